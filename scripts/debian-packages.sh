# Sourced: packages of another Debian release, unpacked beside the machine's own. Nothing is installed.

debian_keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# fetch_debian_packages DIR SUITES SUITE PACKAGE...: downloads the packages and what they need from SUITE, with
# SUITES as what apt knows, into DIR/archives. Fails where Debian's archive does not answer.
fetch_debian_packages() {
    local apt=$1 suites=$2 suite=$3 each
    shift 3
    [ -e "$debian_keyring" ] || {
        echo "$debian_keyring is missing (package debian-archive-keyring)" >&2
        return 1
    }
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$apt/parts"
    for each in $suites; do
        echo "deb [arch=amd64 signed-by=$debian_keyring] http://deb.debian.org/debian $each main"
    done >"$apt/sources.list"
    : >"$apt/status"
    local options=(-o "Dir::State=$apt" -o "Dir::State::lists=$apt/lists" -o "Dir::State::status=$apt/status"
        -o "Dir::Cache=$apt" -o "Dir::Cache::archives=$apt/archives" -o "Dir::Etc::sourcelist=$apt/sources.list"
        -o "Dir::Etc::sourceparts=$apt/parts" -o "Dir::Etc::preferencesparts=$apt/parts"
        # A mirror may be some weeks behind; what it has is signed all the same.
        -o Acquire::Check-Valid-Until=false
        -o Debug::NoLocking=1 -o "APT::Sandbox::User=$(id -un)" -o APT::Architecture=amd64)
    apt-get "${options[@]}" update -qq &&
        apt-get "${options[@]}" install -y -qq --download-only --no-install-recommends -t "$suite" "$@" >/dev/null
}
