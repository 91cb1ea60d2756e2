"""`baton trace`: recent requests as a table, one request as a waterfall, and files that Perfetto opens.

Owns formatting alone; what is shown is `ListTraces` of a router that keeps traces (--trace). Names that clients chose
are shown without the control characters that could be in them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from baton.client import Client
from baton.options import TraceConfig
from baton.perfetto import TraceFile
from protos import inference_pb2
from runtime.errors import NotFound

BAR_COLUMNS = 40
NAME_COLUMNS, PROCESS_COLUMNS = 22, 22
MAX_EVENTS = 12
"""Events shown of a span, from its beginning."""


def show_traces(config: TraceConfig, output: TextIO) -> int:
    """Shows traces, or writes them to a file; the exit code. NotFound where the router has none of the request."""
    with Client(config.address, timeout_s=config.timeout_s, **config.credentials()) as client:
        traces = client.traces(config.request_id or "", config.limit)
    if config.request_id is not None and not traces:
        text = f"{config.address} keeps no trace of {config.request_id!r}; is it a router with --trace?"
        raise NotFound("trace", config.request_id, text)
    if config.perfetto is not None:
        write_perfetto(traces, config.perfetto)
        output.write(f"{len(traces)} traces are in {config.perfetto}; open it at https://ui.perfetto.dev\n")
    elif config.request_id is not None:
        for trace in traces:
            write_waterfall(trace, output)
    else:
        write_table(traces, output)
    return 0


def write_table(traces: Iterable[inference_pb2.Trace], output: TextIO) -> None:
    """A line for each request."""
    rows = [["began", "request", "total ms", "first ms", "in", "out", "attempts", "status", "waited most for"]]
    for trace in traces:
        facts = trace.spans[0].attributes
        name, waited_s = max(_waits(trace).items(), key=lambda item: item[1], default=("", 0.0))
        total_s = _total_s(trace)
        rows.append(
            [
                _clock(trace),
                _printable(trace.request_id) or "-",
                f"{1000 * total_s:.1f}",
                f"{1000 * trace.first_token_s:.1f}" if trace.HasField("first_token_s") else "-",
                facts.get("gen_ai.usage.input_tokens", "-"),
                facts.get("gen_ai.usage.output_tokens", "-"),
                facts.get("baton.num_attempts", "-"),
                facts.get("rpc.status_code", "-"),
                f"{name} {waited_s / total_s:.0%}" if total_s else name,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        output.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def write_waterfall(trace: inference_pb2.Trace, output: TextIO) -> None:
    """All that is known of a request, in the order of time."""
    whole, facts = trace.spans[0], trace.spans[0].attributes
    first = f", first token after {1000 * trace.first_token_s:.1f} ms" if trace.HasField("first_token_s") else ""
    output.write(
        f"{_printable(trace.request_id) or 'refused'}: {facts.get('rpc.status_code', '')}, "
        f"{facts.get('gen_ai.usage.input_tokens', '?')} tokens in, {facts.get('gen_ai.usage.output_tokens', '0')} out, "
        f"{1000 * whole.end_s:.1f} ms{first}\n"
        f"began {_clock(trace)}, trace {trace.trace_id}\n"
    )
    waits = sorted(_waits(trace).items(), key=lambda item: -item[1])
    output.write("the client waited for " + ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in waits) + "\n\n")
    output.write(f"{'':{NAME_COLUMNS + PROCESS_COLUMNS + 1}}{'start ms':>10}{'length ms':>11}\n")
    depths: dict[str, int] = {}
    for span in trace.spans:
        depth = depths[span.span_id] = depths.get(span.parent_id, -1) + 1
        _write_span(span, depth, whole.end_s, is_whole=span is whole, output=output)
    output.write("\n")


def _write_span(span: inference_pb2.TraceSpan, depth: int, total_s: float, is_whole: bool, output: TextIO) -> None:
    name = "  " * depth + ("request" if is_whole else span.name)
    process = _printable(span.instance)[:PROCESS_COLUMNS]
    times = f"{1000 * span.start_s:>10.1f}{1000 * (span.end_s - span.start_s):>11.1f}"
    output.write(f"{name:{NAME_COLUMNS}} {process:{PROCESS_COLUMNS}}{times}  {_bar(span, total_s)}\n".rstrip() + "\n")
    indent = "  " * (depth + 2)
    if span.error:
        output.write(f"{indent}! {_printable(span.error)}\n")
    if span.attributes and not is_whole:
        output.write(f"{indent}{_facts(span.attributes)}\n")
    for event in span.events[:MAX_EVENTS]:
        output.write(f"{indent}{1000 * event.at_s:.1f} {event.name} {_facts(event.attributes)}".rstrip() + "\n")
    if len(span.events) > MAX_EVENTS:
        output.write(f"{indent}and {len(span.events) - MAX_EVENTS} more\n")


def _bar(span: inference_pb2.TraceSpan, total_s: float) -> str:
    scale = BAR_COLUMNS / total_s if total_s else 0.0
    before = min(BAR_COLUMNS - 1, int(span.start_s * scale))
    length = max(1, min(BAR_COLUMNS, round(span.end_s * scale)) - before)
    return " " * before + "█" * length


def _facts(attributes: Mapping[str, str]) -> str:
    return "  ".join(f"{name.removeprefix('baton.')}={_printable(attributes[name])}" for name in sorted(attributes))


def _waits(trace: inference_pb2.Trace) -> dict[str, float]:
    """How long the client waited for what."""
    waits: dict[str, float] = {}
    for part in trace.parts:
        waits[part.name] = waits.get(part.name, 0.0) + part.end_s - part.start_s
    return waits


def _total_s(trace: inference_pb2.Trace) -> float:
    return trace.spans[0].end_s


def _clock(trace: inference_pb2.Trace) -> str:
    return time.strftime("%H:%M:%S", time.localtime(trace.began_unix_s))


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def write_perfetto(traces: Sequence[inference_pb2.Trace], path: Path) -> None:
    """A file of trace events: a track for each process and request, and one for what each client waited for."""
    file = TraceFile()
    earliest_s = min((trace.began_unix_s for trace in traces), default=0.0)
    for number, trace in enumerate(traces, 1):
        began_s, name = trace.began_unix_s - earliest_s, trace.request_id or "refused"
        for part in trace.parts:
            track = file.track("critical path", number, name)
            file.slice(track, part.name, began_s + part.start_s, began_s + part.end_s)
        for span in trace.spans:
            track = file.track(f"{span.service} {span.instance}", number, name)
            arguments = {**span.attributes, **({"error": span.error} if span.error else {})}
            file.slice(track, span.name, began_s + span.start_s, began_s + span.end_s, arguments)
            for event in span.events:
                file.instant(track, event.name, began_s + event.at_s, dict(event.attributes))
    file.write(path)
