"use strict";
const at = id => document.getElementById(id);
const talk = [];
let canChat = true, before = null, controller = null;

function headers() {
  const token = at("token").value.trim();
  return token ? {"Authorization": "Bearer " + token} : {};
}

function say(role, text) {
  const element = document.createElement("div");
  element.className = "message " + role;
  element.textContent = text;
  at("talk").append(element);
  element.scrollIntoView({block: "end"});
  return element;
}

function note(text, isError) {
  const element = say("note" + (isError ? " error" : ""), text);
  element.classList.remove("message");
  return element;
}

// Shows how each device of the ring spent its time since the last update.
async function update() {
  let ring;
  try {
    const response = await fetch("ring", {headers: headers()});
    if (!response.ok) {
      at("state").textContent = response.status === 401 ? "enter the token under Settings" : "no response";
      return;
    }
    ring = await response.json();
  } catch {
    at("state").textContent = "the server cannot be reached";
    return;
  }
  canChat = ring.can_chat;
  at("model").textContent = ring.model + (canChat ? "" : " (text completion: the model has no chat template)");
  const now = ring.status, list = at("ring");
  while (list.children.length < ring.devices.length) {
    const item = document.createElement("li");
    item.innerHTML = '<div class="name"></div><div class="layers"></div><div class="bar"><i class="computing"></i><i class="disk"></i></div>';
    list.append(item);
  }
  ring.devices.forEach((device, place) => {
    const item = list.children[place];
    item.querySelector(".name").textContent = device.name + (place === 0 && device.name !== "head" ? " (head)" : "");
    item.querySelector(".layers").textContent =
      device.layers + " layers" + (ring.rounds > 1 ? " in " + ring.rounds + " rounds" : "");
    const was = before && before.devices[device.name], is = now.devices[device.name];
    if (!was || !is) return;
    const more = key => Math.max(0, is[key] - was[key]);
    const all = more("computing_s") + more("disk_wait_s") + more("waiting_s");
    if (all === 0) return;
    const share = key => (100 * more(key) / all).toFixed(1) + "%";
    item.querySelector(".computing").style.width = share("computing_s");
    item.querySelector(".disk").style.width = share("disk_wait_s");
    item.title = "computing " + share("computing_s") + ", disk " + share("disk_wait_s");
  });
  const rate = before ? (now.generated - before.generated) / (now.uptime_s - before.uptime_s) : 0;
  at("state").textContent = !now.is_up ? "the ring is down"
    : now.active === 0 ? "idle" : now.active + (now.active === 1 ? " request" : " requests") + (rate > 0 ? ", " + rate.toFixed(1) + " tokens/s" : "");
  before = now;
}

async function ask(text) {
  const system = at("system").value.trim();
  const messages = (system ? [{role: "system", content: system}] : []).concat(talk, [{role: "user", content: text}]);
  const common = {stream: true, temperature: Number(at("temperature").value), ...(at("max-tokens").value ? {max_tokens: Number(at("max-tokens").value)} : {}),
    stream_options: {include_usage: true}};
  const body = canChat ? {messages, ...common} : {prompt: text, ...common};
  controller = new AbortController();
  const begun = performance.now();
  const response = await fetch(canChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST", signal: controller.signal, body: JSON.stringify(body),
    headers: {"Content-Type": "application/json", ...headers()},
  });
  if (!response.ok) {
    const failure = await response.json().catch(() => null);
    throw new Error(failure ? failure.error.message : "status " + response.status);
  }
  const element = say("assistant", "");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", answer = "", first = null, usage = null, failure = null;
  const keep = () => talk.push({role: "user", content: text}, {role: "assistant", content: answer});
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
          const more = choice.delta ? choice.delta.content : choice.text;
          if (!more) continue;
          first = first ?? performance.now();
          answer += more;
          element.textContent = answer;
        }
        at("talk").scrollTop = at("talk").scrollHeight;
      }
    }
  } finally {
    if (answer) keep();
    if (!answer) element.remove();
  }
  if (failure) throw new Error(failure);
  if (usage) {
    const seconds = (performance.now() - (first ?? begun)) / 1000, after = usage.completion_tokens - 1;
    const held = usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
    note(usage.completion_tokens + " tokens" + (after > 0 && seconds > 0 ? ", " + (after / seconds).toFixed(1) + " tokens/s" : "") +
      ", first token after " + (((first ?? begun) - begun) / 1000).toFixed(2) + " s, prompt of " + usage.prompt_tokens + " tokens" +
      (held ? ", " + held + " cached" : ""));
  }
}

at("ask").addEventListener("submit", async event => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || controller) return;
  at("text").value = "";
  say("user", text);
  at("go").disabled = true;
  at("stop").hidden = false;
  try {
    await ask(text);
  } catch (error) {
    note(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  controller = null;
  at("go").disabled = false;
  at("stop").hidden = true;
  at("text").focus();
});
at("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("ask").requestSubmit(); }
});
at("stop").addEventListener("click", () => controller && controller.abort());
at("new").addEventListener("click", () => { talk.length = 0; at("talk").replaceChildren(); });
update();
setInterval(update, 1000);
