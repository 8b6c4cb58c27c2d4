"""Times llama.cpp by the method of `hearth bench`: takes MODEL THREADS PROMPTS TOKENS and prints a JSON object."""
import ctypes, json, statistics, sys, time

try:
    import llama_cpp as L
except ImportError:
    sys.exit(77)

path, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[4])
prompts = [int(text) for text in sys.argv[3].split(",")]

quiet = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(quiet, ctypes.c_void_p(0))
start = time.perf_counter()
L.llama_backend_init()
model_options = L.llama_model_default_params()
model_options.n_gpu_layers = 0
model = L.llama_model_load_from_file(path.encode(), model_options)
if not model:
    sys.exit("llama.cpp cannot load the model")
options = L.llama_context_default_params()
options.n_ctx = max(prompts + [tokens + 1])
options.n_batch = options.n_ubatch = max(prompts + [1])
options.n_threads = options.n_threads_batch = threads
context = L.llama_init_from_model(model, options)
vocabulary = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))


def run(ids):
    tokens = (L.llama_token * len(ids))(*ids)  # must outlive the batch, which points to it
    code = L.llama_decode(context, L.llama_batch_get_one(tokens, len(ids)))
    if code != 0:
        sys.exit(f"llama.cpp cannot run {len(ids)} tokens: llama_decode returned {code}")
    logits = L.llama_get_logits_ith(context, -1)
    # Any token suffices. A search over all logits would take longer in Python than the next token in the model.
    return max(range(0, vocabulary, 997), key=lambda at: logits[at])


def forget():
    L.llama_memory_clear(L.llama_get_memory(context), True)


def resident_bytes():
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return None


run([0])
load = time.perf_counter() - start
token, times = 0, []
for _ in range(tokens):
    start = time.perf_counter()
    token = run([token])
    times.append(time.perf_counter() - start)
resident = resident_bytes()
prefill = []
for length in prompts:
    forget()
    start = time.perf_counter()
    run([at * 7919 % vocabulary for at in range(length)])
    prefill.append({"tokens": length, "tokens_per_s": length / (time.perf_counter() - start)})
# "CPU : SSE3 = 1 | AVX2 = 1 | REPACK = 1 |" becomes "SSE3 AVX2 REPACK".
parts = L.llama_print_system_info().decode().replace(":", "|").split("|")
features = " ".join(part.split("=")[0].strip() for part in parts if part.split("=")[1:] == [" 1 "])
print(json.dumps({
    "load_s": load,
    "prefill": prefill,
    "instructions": features,
    "decode_tokens_per_s": 1 / statistics.median(times),
    "resident_bytes": resident,
    "resident_bytes_after_prompts": resident_bytes(),
}))
