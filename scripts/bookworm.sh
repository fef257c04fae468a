# Sourced: `bookworm FOLDER COMMAND...` runs apt-get or apt-cache on Debian 12's
# archive, with lists and downloads of its own below FOLDER. The machine's own
# sources and packages are neither read nor changed.

bookworm_keyring=/usr/share/keyrings/debian-archive-keyring.gpg

bookworm() {
    local folder=$1 tool=$2
    shift 2
    if [ ! -e "$folder/sources.list" ]; then
        mkdir -p "$folder/lists/partial" "$folder/archives/partial" "$folder/parts"
        : >"$folder/status"
        for suite in bookworm bookworm-backports; do
            echo "deb [arch=amd64 signed-by=$bookworm_keyring] http://deb.debian.org/debian $suite main"
        done >"$folder/sources.list"
    fi
    "$tool" -o "Dir::State=$folder" -o "Dir::State::lists=$folder/lists" \
        -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder" \
        -o "Dir::Cache::archives=$folder/archives" -o "Dir::Etc::sourcelist=$folder/sources.list" \
        -o "Dir::Etc::sourceparts=$folder/parts" -o "Dir::Etc::preferencesparts=$folder/parts" \
        -o Debug::NoLocking=1 -o "APT::Sandbox::User=$(id -un)" -o APT::Architecture=amd64 "$@"
}
