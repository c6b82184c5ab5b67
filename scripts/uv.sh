# Sourced by the scripts that install: uv with the settings of pip.

# use_pip_settings PYTHON: uv reads none of pip's settings; pass on where packages come from.
use_pip_settings() {
    local settings
    settings=$("$1" -m pip config list 2>/dev/null | "$1" -c '
import ast, shlex, sys
names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS", "no-index": "UV_NO_INDEX",
         "constraint": "UV_CONSTRAINT", "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE",
         "timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT"}
found = {}
for line in sys.stdin:  # files first, then the environment
    key, _, value = line.strip().partition("=")
    section, _, key = key.rpartition(".")
    words = ast.literal_eval(value).split() if key in names and section in ("global", "install", ":env:") else []
    if words:  # pip ignores an empty setting
        found[names[key]] = ("," if key == "find-links" else " ").join(words)
for name, value in found.items():
    print(f": ${{{name}:={shlex.quote(value)}}}; export {name}")')
    eval "$settings"
    # As pip does: the best version of all indexes, and no Python but the one that was chosen.
    export UV_INDEX_STRATEGY=unsafe-best-match UV_PYTHON_DOWNLOADS=never
}
