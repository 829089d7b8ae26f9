#!/usr/bin/env bash
# Makes sure that a Chromium is there for static images (PNG, SVG, PDF); installs Debian's where that is possible.
set -euo pipefail
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && exit 0
done
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null
    exit 0
fi
echo "No Chromium found. Static images and their tests need one: for example 'sudo apt-get install chromium'." >&2
exit 1
