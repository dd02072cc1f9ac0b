#!/bin/sh
# The report is tested in a real browser. Installs Chromium if it is missing and can be installed (Debian, as root);
# otherwise prints a message, and the browser tests are skipped for the same reason.
set -u
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing Chromium for the report's tests"
    { apt-get update -q && apt-get install -y -q --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 && exit 0
fi
echo "Chromium and chromedriver are not installed: the report's browser tests will be skipped"
