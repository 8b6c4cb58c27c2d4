"use strict";
const at = id => document.getElementById(id);
const SETTINGS = ["temperature", "max-tokens", "system", "token"];

// The conversation: messages of the API, in which an answer that was stopped has `partial`.
let talk = [];
// The number of tokens of the conversation, and of the context.
let used = 0, context = 0;
let canChat = true, before = null, controller = null;
// The devices that were part of the ring, by name, each with its list item.
const devices = new Map();

function headers() {
  const token = at("token").value.trim();
  return token ? {"Authorization": "Bearer " + token} : {};
}

// A reload of the page keeps all until the tab is closed.
function save() {
  const settings = Object.fromEntries(SETTINGS.map(id => [id, at(id).value]));
  try { sessionStorage.setItem("hearth", JSON.stringify({talk, used, settings})); } catch { /* it is full or forbidden */ }
}

function restore() {
  let saved = null;
  try { saved = JSON.parse(sessionStorage.getItem("hearth")); } catch { /* it is forbidden */ }
  if (!saved) return;
  ({talk, used} = saved);
  for (const [id, value] of Object.entries(saved.settings)) at(id).value = value;
  for (const message of talk) {
    const shown = show(message.role);
    shown.update(message.content, message.reasoning_content ?? "");
    if (message.partial) note("stopped");
  }
}

// Adds a message to the page. `update` changes its text.
function show(role) {
  const message = document.createElement("div");
  message.className = "message " + role;
  const thoughts = element("details", element("summary", "Thoughts"), element("p")), body = document.createElement("div");
  thoughts.hidden = true;
  message.append(thoughts, body);
  at("talk").append(message);
  const update = (text, reasoning) => {
    thoughts.hidden = !reasoning;
    thoughts.lastChild.textContent = reasoning;
    if (role === "user") body.textContent = text;
    else body.replaceChildren(...blocks(text));
    at("talk").scrollTop = at("talk").scrollHeight;
  };
  return {update, remove: () => message.remove()};
}

function note(text, isError) {
  const made = element("div", text);
  made.className = "note" + (isError ? " error" : "");
  at("talk").append(made);
  made.scrollIntoView({block: "end"});
}

// Adds a line to the log of errors and of devices that join or leave.
function log(text) {
  const lines = at("log-lines");
  lines.append(element("li", new Date().toLocaleTimeString() + " " + text));
  if (lines.children.length > 100) lines.firstChild.remove();
  at("log").hidden = false;
  at("log-title").textContent = "Log (" + lines.children.length + ")";
}

function showContext() {
  const format = new Intl.NumberFormat();
  at("context").textContent = context ? format.format(used) + " of " + format.format(context) + " tokens of the context" : "";
  at("context").classList.toggle("error", context > 0 && used > 0.9 * context);
}

function deviceItem(name) {
  const item = document.createElement("li");
  const bar = element("div", element("i"), element("i"));
  bar.className = "bar";
  bar.children[0].className = "computing";
  bar.children[1].className = "disk";
  item.append(element("div", name), element("div"), bar);
  item.children[0].className = "name";
  item.children[1].className = "layers";
  at("ring").append(item);
  return item;
}

// Shows the devices of the ring, and those that have left it.
function showDevices(ring) {
  const isFirst = devices.size === 0, names = new Set(ring.devices.map(device => device.name));
  ring.devices.forEach((device, place) => {
    if (!devices.has(device.name)) {
      devices.set(device.name, deviceItem(device.name + (place === 0 && device.name !== "head" ? " (head)" : "")));
      if (!isFirst) log(device.name + " has joined the ring");
    }
    const item = devices.get(device.name);
    if (item.classList.contains("gone")) log(device.name + " is back");
    item.classList.remove("gone");
    const layers = device.layers + " layers" + (ring.rounds > 1 ? " in " + ring.rounds + " rounds" : "");
    if (item.children[1].textContent.includes("layers") && item.children[1].textContent !== layers) log(device.name + " now has " + layers);
    item.children[1].textContent = layers;
    const was = before?.devices[device.name], is = ring.status.devices[device.name];
    if (!was || !is) return;
    const more = key => Math.max(0, is[key] - was[key]);
    const all = more("computing_s") + more("disk_wait_s") + more("waiting_s");
    if (all === 0) return;
    const share = key => (100 * more(key) / all).toFixed(1) + "%";
    item.querySelector(".computing").style.width = share("computing_s");
    item.querySelector(".disk").style.width = share("disk_wait_s");
    item.title = "computing " + share("computing_s") + ", disk " + share("disk_wait_s");
  });
  for (const [name, item] of devices) {
    if (names.has(name) || item.classList.contains("gone")) continue;
    item.classList.add("gone");
    item.children[1].textContent = "gone";
    log(name + " has left the ring");
  }
}

// Shows the state of the ring.
async function update() {
  let ring;
  const state = text => {
    if (at("state").textContent !== text && (text.startsWith("the ") || text.startsWith("no "))) log(text);
    at("state").textContent = text;
  };
  try {
    const response = await fetch("ring", {headers: headers()});
    if (!response.ok) return state(response.status === 401 ? "enter the token under Settings" : "no response");
    ring = await response.json();
  } catch {
    return state("the server cannot be reached");
  }
  canChat = ring.can_chat;
  context = ring.context;
  at("model").textContent = ring.model + (canChat ? "" : " (text completion: the model has no chat template)");
  showDevices(ring);
  showContext();
  const now = ring.status;
  const rate = before ? (now.generated - before.generated) / (now.uptime_s - before.uptime_s) : 0;
  state(!now.is_up ? "the ring is down"
    : now.active === 0 ? "idle" : now.active + (now.active === 1 ? " request" : " requests") + (rate > 0 ? ", " + rate.toFixed(1) + " tokens/s" : ""));
  before = now;
}

// Sends the conversation with a new message, and shows the answer as it arrives.
async function ask(text) {
  const system = at("system").value.trim(), maxTokens = at("max-tokens").value;
  const messages = (system ? [{role: "system", content: system}] : []).concat(
    talk.map(({role, content}) => ({role, content})), [{role: "user", content: text}]);
  const common = {stream: true, temperature: Number(at("temperature").value), ...(maxTokens ? {max_tokens: Number(maxTokens)} : {}),
    stream_options: {include_usage: true}};
  const body = canChat ? {messages, ...common} : {prompt: text, ...common};
  controller = new AbortController();
  const begun = performance.now();
  const answer = {role: "assistant", content: "", partial: true};
  let shown = null, first = null, usage = null, failure = null, isDrawn = false;
  // An answer that has just begun belongs to the conversation, so that a reload keeps it.
  const begin = () => {
    first = performance.now();
    shown = show("assistant");
    talk.push({role: "user", content: text}, answer);
  };
  const draw = () => {
    isDrawn = false;
    shown.update(answer.content, answer.reasoning_content ?? "");
    save();
  };
  const response = await fetch(canChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST", signal: controller.signal, body: JSON.stringify(body),
    headers: {"Content-Type": "application/json", ...headers()},
  });
  if (!response.ok) {
    const failed = await response.json().catch(() => null);
    throw new Error(failed ? failed.error.message : "status " + response.status);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const piece = JSON.parse(line.slice(6));
        if (piece.error) { failure = piece.error.message; continue; }
        usage = piece.usage || usage;
        for (const choice of piece.choices) {
          const more = (choice.delta ? choice.delta.content : choice.text) ?? "", thought = choice.delta?.reasoning_content ?? "";
          if (!more && !thought) continue;
          if (!shown) begin();
          answer.content += more;
          if (thought) answer.reasoning_content = (answer.reasoning_content ?? "") + thought;
          // At most one update for each picture of the screen.
          if (!isDrawn) { isDrawn = true; requestAnimationFrame(draw); }
        }
      }
    }
    if (!failure) delete answer.partial;
  } finally {
    if (shown) draw();
  }
  if (failure) throw new Error(failure);
  if (usage) {
    const seconds = (performance.now() - (first ?? begun)) / 1000, after = usage.completion_tokens - 1;
    used = usage.total_tokens;
    note(usage.completion_tokens + " tokens" + (after > 0 && seconds > 0 ? ", " + (after / seconds).toFixed(1) + " tokens/s" : "") +
      ", first token after " + (((first ?? begun) - begun) / 1000).toFixed(2) + " s, prompt of " + usage.prompt_tokens + " tokens");
    showContext();
  }
}

at("ask").addEventListener("submit", async event => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || controller) return;
  at("text").value = "";
  show("user").update(text, "");
  const conversation = talk;
  at("go").disabled = true;
  at("stop").hidden = false;
  try {
    await ask(text);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    // A new conversation stops the answer, too.
    if (talk === conversation) note(isStopped ? "stopped" : error.message, !isStopped);
    if (!isStopped) log(error.message);
  }
  controller = null;
  at("go").disabled = false;
  at("stop").hidden = true;
  save();
  at("text").focus();
});
at("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("ask").requestSubmit(); }
});
at("stop").addEventListener("click", () => controller && controller.abort());
at("new").addEventListener("click", () => {
  if (controller) controller.abort();
  [talk, used] = [[], 0];
  at("talk").replaceChildren();
  showContext();
  save();
  at("text").focus();
});
for (const id of SETTINGS) at(id).addEventListener("change", save);
restore();
update();
setInterval(update, 1000);
