#!/bin/sh
# Gets what some tests need out of Debian's packages, which are taken apart here and not installed, so that nobody has
# to be root: to $1/promtool the program that plays the alert rules (19 MB), and to $1/lib the libraries that the
# transport mooncake wants of the system. Does nothing where all is there already. Whatever goes wrong is one line, and
# the tests in question are skipped: never a failure of whoever calls this.
set -u
mkdir -p "$1" && folder=$(cd "$1" && pwd) || exit 0
has_promtool=$({ [ -x "$folder/promtool" ] || command -v promtool; } >/dev/null && echo yes)
has_libraries=$({ [ -e "$folder/lib/libibverbs.so.1" ] || ldconfig -p | grep libibverbs.so.1; } >/dev/null 2>&1 && echo yes)
if [ "$has_promtool" ] && [ "$has_libraries" ]; then exit 0; fi

without() {
    echo "tests of the alert rules or of mooncake will be skipped: $*" >&2
    exit 0
}

for program in apt-get dpkg-deb tar timeout; do
    command -v $program >/dev/null || without "without $program Debian's packages cannot be had"
done
work=$(mktemp -d) || without "no temporary folder"
trap 'rm -rf "$work"' EXIT
cd "$work" && mkdir lists cache || without "no temporary folder"

apt() {
    timeout 120 apt-get -qq -o Acquire::http::Timeout=20 -o Acquire::Retries=0 -o APT::Sandbox::User=root "$@" >>log 2>&1
}

# Package lists of the system may be missing, and then only root can get them: another copy is as good.
download() {
    apart="-o Dir::State=$work -o Dir::State::status=/dev/null -o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache"
    apt download "$@" || { apt $apart update && apt $apart download "$@"; } ||
        without "$(grep -m 1 'Failed to fetch' log || tail -n 1 log)"
}

if [ -z "$has_libraries" ]; then
    download libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1
    for package in lib*.deb; do dpkg-deb -x "$package" unpacked || without "$package cannot be taken apart"; done
    mkdir -p "$folder/lib" && find unpacked -name 'lib*.so.*' -exec cp -P {} "$folder/lib" \; ||
        without "$folder/lib cannot be written"
fi
[ "$has_promtool" ] && exit 0
download prometheus
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x -O ./usr/bin/promtool >promtool && [ -s promtool ] ||
    without "promtool is not in the package"
chmod 755 promtool && ./promtool --version >/dev/null 2>&1 || without "promtool of the package does not run here"
mv promtool "$folder/promtool.new" && mv "$folder/promtool.new" "$folder/promtool" || without "$folder cannot be written"
