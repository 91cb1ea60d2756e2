from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_FINISHED: _ClassVar[Outcome]
    OUTCOME_KV_LOST: _ClassVar[Outcome]
    OUTCOME_EVICTED: _ClassVar[Outcome]

class KVCheck(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_CHECK_UNSPECIFIED: _ClassVar[KVCheck]
    KV_CHECK_REACHABLE: _ClassVar[KVCheck]
    KV_CHECK_SIGN_OF_LIFE: _ClassVar[KVCheck]
    KV_CHECK_EPOCH: _ClassVar[KVCheck]
    KV_CHECK_LAYOUT: _ClassVar[KVCheck]
    KV_CHECK_LEASE: _ClassVar[KVCheck]
    KV_CHECK_BLOCKS: _ClassVar[KVCheck]
    KV_CHECK_COUNT: _ClassVar[KVCheck]
    KV_CHECK_CHECKSUM: _ClassVar[KVCheck]
    KV_CHECK_KEPT: _ClassVar[KVCheck]
    KV_CHECK_READER: _ClassVar[KVCheck]

class DeviceCounted(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_COUNTED_UNSPECIFIED: _ClassVar[DeviceCounted]
    DEVICE_COUNTED_UNITS: _ClassVar[DeviceCounted]
    DEVICE_COUNTED_MEMORY: _ClassVar[DeviceCounted]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_FINISHED: Outcome
OUTCOME_KV_LOST: Outcome
OUTCOME_EVICTED: Outcome
KV_CHECK_UNSPECIFIED: KVCheck
KV_CHECK_REACHABLE: KVCheck
KV_CHECK_SIGN_OF_LIFE: KVCheck
KV_CHECK_EPOCH: KVCheck
KV_CHECK_LAYOUT: KVCheck
KV_CHECK_LEASE: KVCheck
KV_CHECK_BLOCKS: KVCheck
KV_CHECK_COUNT: KVCheck
KV_CHECK_CHECKSUM: KVCheck
KV_CHECK_KEPT: KVCheck
KV_CHECK_READER: KVCheck
DEVICE_COUNTED_UNSPECIFIED: DeviceCounted
DEVICE_COUNTED_UNITS: DeviceCounted
DEVICE_COUNTED_MEMORY: DeviceCounted

class Attempt(_message.Message):
    __slots__ = ("attempt_id", "request_id", "prompt_token_ids", "output_token_ids", "sampling", "priority", "waited_ms", "fingerprint", "tenant", "num_evictions", "session")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    priority: _inference_pb2.Priority
    waited_ms: int
    fingerprint: str
    tenant: str
    num_evictions: int
    session: SessionTurn
    def __init__(self, attempt_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[_Union[_inference_pb2.Priority, str]] = ..., waited_ms: _Optional[int] = ..., fingerprint: _Optional[str] = ..., tenant: _Optional[str] = ..., num_evictions: _Optional[int] = ..., session: _Optional[_Union[SessionTurn, _Mapping]] = ...) -> None: ...

class SessionTurn(_message.Message):
    __slots__ = ("session_key", "fence", "ttl_ms")
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session_key: bytes
    fence: int
    ttl_ms: int
    def __init__(self, session_key: _Optional[bytes] = ..., fence: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PrefillRunRequest(_message.Message):
    __slots__ = ("attempt", "lender")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LENDER_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    lender: KVSource
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., lender: _Optional[_Union[KVSource, _Mapping]] = ...) -> None: ...

class PrefillRunResponse(_message.Message):
    __slots__ = ("accepted", "first_token", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    first_token: PrefillFirstToken
    finished: PrefillFinished
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., finished: _Optional[_Union[PrefillFinished, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("epoch", "cached_tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    cached_tokens: int
    def __init__(self, epoch: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillFirstToken(_message.Message):
    __slots__ = ("token", "cached_tokens", "queue_ms", "prefill_ms", "timeline", "lent_bytes")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    LENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    token: DecodedToken
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    timeline: Timeline
    lent_bytes: int
    def __init__(self, token: _Optional[_Union[DecodedToken, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., lent_bytes: _Optional[int] = ...) -> None: ...

class PrefillFinished(_message.Message):
    __slots__ = ("intact",)
    INTACT_FIELD_NUMBER: _ClassVar[int]
    intact: bool
    def __init__(self, intact: _Optional[bool] = ...) -> None: ...

class DecodedToken(_message.Message):
    __slots__ = ("position", "token_id", "logprob", "top_logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_id: int
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprob]
    def __init__(self, position: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class KVSource(_message.Message):
    __slots__ = ("worker_id", "address", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DecodeRunRequest(_message.Message):
    __slots__ = ("attempt", "router_id", "source", "max_local_tokens", "keep_tokens", "lends")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENDS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    router_id: str
    source: KVSource
    max_local_tokens: int
    keep_tokens: int
    lends: bool
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., router_id: _Optional[str] = ..., source: _Optional[_Union[KVSource, _Mapping]] = ..., max_local_tokens: _Optional[int] = ..., keep_tokens: _Optional[int] = ..., lends: _Optional[bool] = ...) -> None: ...

class DecodeRunResponse(_message.Message):
    __slots__ = ("outcome", "finish_reason", "matched_token_id", "num_tokens", "cached_tokens", "kv_bytes", "transport", "queue_ms", "transfer_ms", "prefill_ms", "detail", "timeline", "failed_check", "num_drafts", "num_accepted_drafts", "num_draft_steps", "drafting_ms")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    FAILED_CHECK_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_MS_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    finish_reason: _inference_pb2.FinishReason
    matched_token_id: int
    num_tokens: int
    cached_tokens: int
    kv_bytes: int
    transport: str
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    detail: str
    timeline: Timeline
    failed_check: KVCheck
    num_drafts: int
    num_accepted_drafts: int
    num_draft_steps: int
    drafting_ms: float
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., queue_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., detail: _Optional[str] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., failed_check: _Optional[_Union[KVCheck, str]] = ..., num_drafts: _Optional[int] = ..., num_accepted_drafts: _Optional[int] = ..., num_draft_steps: _Optional[int] = ..., drafting_ms: _Optional[float] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("age_ms", "moments", "num_left_out")
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    age_ms: float
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    num_left_out: int
    def __init__(self, age_ms: _Optional[float] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., num_left_out: _Optional[int] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("name", "at_ms", "num_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    at_ms: float
    num_tokens: int
    def __init__(self, name: _Optional[str] = ..., at_ms: _Optional[float] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptTokens]
    def __init__(self, attempts: _Optional[_Iterable[_Union[AttemptTokens, _Mapping]]] = ...) -> None: ...

class AttemptTokens(_message.Message):
    __slots__ = ("attempt_id", "tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    tokens: _containers.RepeatedCompositeFieldContainer[DecodedToken]
    def __init__(self, attempt_id: _Optional[bytes] = ..., tokens: _Optional[_Iterable[_Union[DecodedToken, _Mapping]]] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("attempt_id", "num_output_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    num_output_tokens: int
    def __init__(self, attempt_id: _Optional[bytes] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("attempt_id", "epoch", "have_tokens", "transport", "layout", "lent_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    epoch: int
    have_tokens: int
    transport: str
    layout: str
    lent_tokens: int
    def __init__(self, attempt_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., have_tokens: _Optional[int] = ..., transport: _Optional[str] = ..., layout: _Optional[str] = ..., lent_tokens: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("first_block", "block_ids", "data")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, first_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("attempt_id", "epoch", "num_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    epoch: int
    num_tokens: int
    def __init__(self, attempt_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("intact", "epoch", "num_tokens", "checksum", "first_token")
    INTACT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    intact: bool
    epoch: int
    num_tokens: int
    checksum: int
    first_token: DecodedToken
    def __init__(self, intact: _Optional[bool] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., checksum: _Optional[int] = ..., first_token: _Optional[_Union[DecodedToken, _Mapping]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: str
    def __init__(self, nonce: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "model", "layout", "block_size", "block_bytes", "transports", "num_seats")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEATS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    role: _inference_pb2.WorkerRole
    model: _inference_pb2.GetModelResponse
    layout: str
    block_size: int
    block_bytes: int
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    num_seats: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[_inference_pb2.WorkerRole, str]] = ..., model: _Optional[_Union[_inference_pb2.GetModelResponse, _Mapping]] = ..., layout: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., num_seats: _Optional[int] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "parameters")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("state", "epoch", "load")
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    state: _inference_pb2.WorkerState
    epoch: int
    load: _inference_pb2.WorkerLoad
    def __init__(self, state: _Optional[_Union[_inference_pb2.WorkerState, str]] = ..., epoch: _Optional[int] = ..., load: _Optional[_Union[_inference_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms", "next_role")
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    next_role: _inference_pb2.WorkerRole
    def __init__(self, timeout_ms: _Optional[int] = ..., next_role: _Optional[_Union[_inference_pb2.WorkerRole, str]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_evicted",)
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    num_evicted: int
    def __init__(self, num_evicted: _Optional[int] = ...) -> None: ...

class FindSessionRequest(_message.Message):
    __slots__ = ("session_key",)
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    session_key: bytes
    def __init__(self, session_key: _Optional[bytes] = ...) -> None: ...

class FindSessionResponse(_message.Message):
    __slots__ = ("fence", "token_ids")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fence: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ForgetSessionRequest(_message.Message):
    __slots__ = ("session_key",)
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    session_key: bytes
    def __init__(self, session_key: _Optional[bytes] = ...) -> None: ...

class ForgetSessionResponse(_message.Message):
    __slots__ = ("existed",)
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    existed: bool
    def __init__(self, existed: _Optional[bool] = ...) -> None: ...

class HandOffSessionRequest(_message.Message):
    __slots__ = ("given_up_attempt_id",)
    GIVEN_UP_ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    given_up_attempt_id: bytes
    def __init__(self, given_up_attempt_id: _Optional[bytes] = ...) -> None: ...

class HandOffSessionResponse(_message.Message):
    __slots__ = ("attempt", "keep_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    keep_tokens: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., keep_tokens: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("num_steps", "max_wait_ms", "measure_peaks", "device_counted")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    MEASURE_PEAKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_COUNTED_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    max_wait_ms: int
    measure_peaks: bool
    device_counted: DeviceCounted
    def __init__(self, num_steps: _Optional[int] = ..., max_wait_ms: _Optional[int] = ..., measure_peaks: _Optional[bool] = ..., device_counted: _Optional[_Union[DeviceCounted, str]] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("worker_id", "role", "device", "dtype", "age_ms", "steps", "peaks", "memory", "device_use")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PEAKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_USE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _inference_pb2.WorkerRole
    device: str
    dtype: str
    age_ms: float
    steps: _containers.RepeatedCompositeFieldContainer[ProfiledStep]
    peaks: DevicePeaks
    memory: MemoryInUse
    device_use: DeviceUse
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_inference_pb2.WorkerRole, str]] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., age_ms: _Optional[float] = ..., steps: _Optional[_Iterable[_Union[ProfiledStep, _Mapping]]] = ..., peaks: _Optional[_Union[DevicePeaks, _Mapping]] = ..., memory: _Optional[_Union[MemoryInUse, _Mapping]] = ..., device_use: _Optional[_Union[DeviceUse, _Mapping]] = ...) -> None: ...

class ProfiledStep(_message.Message):
    __slots__ = ("began_ms", "duration_ms", "num_tokens", "num_sequences", "num_prompt_tokens", "num_flops", "num_bytes", "kv_bytes")
    BEGAN_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FLOPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    began_ms: float
    duration_ms: float
    num_tokens: int
    num_sequences: int
    num_prompt_tokens: int
    num_flops: float
    num_bytes: float
    kv_bytes: int
    def __init__(self, began_ms: _Optional[float] = ..., duration_ms: _Optional[float] = ..., num_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_flops: _Optional[float] = ..., num_bytes: _Optional[float] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class DevicePeaks(_message.Message):
    __slots__ = ("flops_per_s", "bytes_per_s", "num_threads")
    FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    flops_per_s: float
    bytes_per_s: float
    num_threads: int
    def __init__(self, flops_per_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., num_threads: _Optional[int] = ...) -> None: ...

class MemoryInUse(_message.Message):
    __slots__ = ("kv_used_bytes", "kv_cached_bytes", "kv_ceiling_bytes", "resident_bytes", "device_used_bytes", "device_total_bytes")
    KV_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CEILING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    kv_used_bytes: int
    kv_cached_bytes: int
    kv_ceiling_bytes: int
    resident_bytes: int
    device_used_bytes: int
    device_total_bytes: int
    def __init__(self, kv_used_bytes: _Optional[int] = ..., kv_cached_bytes: _Optional[int] = ..., kv_ceiling_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., device_used_bytes: _Optional[int] = ..., device_total_bytes: _Optional[int] = ...) -> None: ...

class DeviceUse(_message.Message):
    __slots__ = ("kernels_s", "cube_s", "vector_s", "load_s", "read_bytes", "written_bytes")
    KERNELS_S_FIELD_NUMBER: _ClassVar[int]
    CUBE_S_FIELD_NUMBER: _ClassVar[int]
    VECTOR_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    kernels_s: float
    cube_s: float
    vector_s: float
    load_s: float
    read_bytes: float
    written_bytes: float
    def __init__(self, kernels_s: _Optional[float] = ..., cube_s: _Optional[float] = ..., vector_s: _Optional[float] = ..., load_s: _Optional[float] = ..., read_bytes: _Optional[float] = ..., written_bytes: _Optional[float] = ...) -> None: ...
