#!/bin/sh
# Gets promtool, which plays the alert rules, to $1/promtool: out of Debian's package prometheus (19 MB), which is taken
# apart here and not installed, so that nobody has to be root. Does nothing where there is one already, or one on PATH.
# Whatever goes wrong is one line, and tests that need it are skipped: never a failure of whoever calls this.
set -u
mkdir -p "$1" && folder=$(cd "$1" && pwd) || exit 0
target=$folder/promtool
if [ -x "$target" ] || command -v promtool >/dev/null; then exit 0; fi

without() {
    echo "no promtool, tests of the alert rules will be skipped: $*" >&2
    exit 0
}

for program in apt-get dpkg-deb tar timeout; do
    command -v $program >/dev/null || without "it is not on PATH, and without $program Debian's package cannot be had"
done
work=$(mktemp -d) || without "no temporary folder"
trap 'rm -rf "$work"' EXIT
cd "$work" && mkdir lists cache || without "no temporary folder"

apt() {
    timeout 120 apt-get -qq -o Acquire::http::Timeout=20 -o Acquire::Retries=0 -o APT::Sandbox::User=root "$@" >>log 2>&1
}
# Package lists of the system may be missing, and then only root can get them: another copy is as good.
apt download prometheus || {
    apart="-o Dir::State=$work -o Dir::State::status=/dev/null -o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache"
    apt $apart update && apt $apart download prometheus
} || without "$(grep -m 1 'Failed to fetch' log || tail -n 1 log)"
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x -O ./usr/bin/promtool >promtool && [ -s promtool ] ||
    without "it is not in the package"
chmod 755 promtool && ./promtool --version >/dev/null 2>&1 || without "the one in the package does not run here"
mv promtool "$target.new" && mv "$target.new" "$target" || without "$target cannot be written"
