"use strict";
// The page: sends chats to this server's own API and shows what speculation does. No build step, no foreign host.

const $ = (selector, from = document) => from.querySelector(selector);
const state = { model: null, turns: [], running: [], busy: false };
const rounds = new WeakMap(); // element -> its round

async function call(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const key = $("#key").value.trim();
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (!answer.ok) {
    const error = await answer.json().catch(() => null);
    throw new Error(error?.error?.message || `the server answered ${answer.status}`);
  }
  return answer;
}

async function connect() {
  try {
    const listed = await (await call("/v1/models")).json();
    state.model = listed.data[0];
    const drafters = state.model.outrider.drafters;
    $("#model").textContent = `${state.model.id} · ${drafters.join(", ") || "no drafter"}`;
    $("#drafter").replaceChildren(new Option("default", ""), ...drafters.map((name) => new Option(name)));
  } catch (error) {
    $("#model").textContent = error.message;
    $("#more").open = true;
  }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function turn(lane, role, text) {
  const made = document.createElement("div");
  made.className = `turn ${role}`;
  made.textContent = text;
  const log = $(".log", lane);
  log.append(made);
  log.scrollTop = log.scrollHeight;
  return made;
}

function show(bubble, round) {
  const made = document.createElement("span");
  made.className = "round";
  for (const [text, drafted] of round.text) {
    const part = document.createElement("span");
    part.className = drafted ? "drafted" : "own";
    part.textContent = text;
    made.append(part);
  }
  if (round.tree) {
    made.tabIndex = bubble.querySelector("[tabindex]") ? -1 : 0; // one stop per answer; arrows go on
    rounds.set(made, round);
  }
  bubble.append(made);
}

function figure(lane, name, value) {
  $(`[data-figure="${name}"]`, lane).textContent = value;
}

// One answer in one lane: resolves to its text.
async function write(lane, speculate, messages, stop) {
  const bubble = turn(lane, "assistant", "");
  const log = $(".log", lane);
  for (const name of ["rate", "tau", "first"]) figure(lane, name, "…");
  const chat = state.model?.outrider.chat !== false;
  const began = performance.now();
  let first = 0, tokens = 0, passes = 0, text = "";
  const body = {
    ...(chat ? { messages } : { prompt: messages.map((m) => m.content).join("\n") }),
    stream: true,
    temperature: Number($("#temperature").value) || 0,
    max_tokens: Math.max(1, Number($("#tokens").value) || 160),
    seed: Math.trunc(Number($("#seed").value)) || 0,
    outrider: { speculate, rounds: true, ...(speculate && $("#drafter").value ? { drafter: $("#drafter").value } : {}) },
  };
  try {
    const answer = await call(chat ? "/v1/chat/completions" : "/v1/completions", body, stop.signal);
    for await (const event of events(answer)) {
      const choice = event.choices[0];
      for (const round of choice?.outrider?.rounds || []) {
        const now = performance.now();
        if (!first) { first = now; figure(lane, "first", `${Math.round(first - began)} ms`); }
        if (round.tree) { passes += 1; tokens += round.accepted + 1; }
        show(bubble, round);
        text += round.text.map(([part]) => part).join("");
        if (passes) {
          figure(lane, "tau", (tokens / passes).toFixed(2));
          figure(lane, "rate", ((tokens * 1000) / Math.max(1, now - first)).toFixed(1));
        }
      }
      if (event.metrics) {
        const spent = event.metrics;
        figure(lane, "tau", spent.speculative_decoding.mean_acceptance_length.toFixed(2));
        if (spent.tokens_per_second) figure(lane, "rate", spent.tokens_per_second.toFixed(1));
        figure(lane, "first", `${Math.round(spent.time_to_first_token_ms)} ms`);
      }
      if (log.scrollHeight - log.scrollTop < log.clientHeight + 160) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      turn(lane, "error", error.message);
      return null;
    }
  }
  return text;
}

async function send() {
  const text = $("#prompt").value.trim();
  if (!text || state.busy) return;
  const both = $("#both").checked;
  const [fast, plain] = document.querySelectorAll(".lane");
  const lanes = both ? [[fast, true], [plain, false]] : [[fast, $("#speculate").checked]];
  const turns = state.turns;  // "new chat" begins another list
  $("#prompt").value = "";
  turns.push({ role: "user", content: text });
  const stop = new AbortController();
  state.running = [stop];
  working(true);
  figure(plain, "same", "");
  for (const [lane] of lanes) turn(lane, "user", text);
  const texts = await Promise.all(lanes.map(([lane, speculate]) => write(lane, speculate, turns, stop)));
  const failed = texts.includes(null);
  if (both && !failed && !stop.signal.aborted) {
    figure(plain, "same", texts[0] === texts[1] ? "✓ the same text" : "✗ texts differ");
  }
  if (failed) turns.pop();  // the question may be asked again
  else turns.push({ role: "assistant", content: texts[0] });
  working(false);
}

function working(busy) {
  state.busy = busy;
  $("#send").textContent = busy ? "Stop" : "Send";
  document.body.dataset.busy = String(busy);
  if (!busy) $("#prompt").focus();
}

function tip(span) {
  const round = rounds.get(span);
  const box = $("#tip");
  if (!round) { box.hidden = true; return; }
  const said = document.createElement("p");
  const drafted = round.tree.tokens.length - 1;
  said.textContent = drafted
    ? `${drafted} drafted, ${round.accepted} accepted, then one of the model’s own`
    : "nothing drafted: one token of the model’s own";
  box.replaceChildren(said, drawTree(round.tree));
  box.hidden = false;
  const at = span.getClientRects()[0] || span.getBoundingClientRect();
  const left = Math.max(6, Math.min(at.left, innerWidth - box.offsetWidth - 6));
  const above = at.top - box.offsetHeight - 6;
  box.style.left = `${left}px`;
  box.style.top = `${above > 6 ? above : Math.min(at.bottom + 6, innerHeight - box.offsetHeight - 6)}px`;
}

function lanes() {
  const both = $("#both").checked;
  $('[data-lane="plain"]').hidden = !both;
  $("#speculate").disabled = both;
  const name = both || $("#speculate").checked ? "with speculation" : "without speculation";
  $('[data-lane="fast"] .name').textContent = name;
}

$("#form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.busy) state.running.forEach((stop) => stop.abort());
  else send();
});
$("#prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  const span = document.activeElement?.closest?.(".round");
  if (event.key === "Escape") {
    $("#tip").hidden = true;
    $("#more").open = false;
    state.running.forEach((stop) => stop.abort());
  } else if (span && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
    const all = [...span.parentElement.querySelectorAll(".round[tabindex]")];
    const next = all[all.indexOf(span) + (event.key === "ArrowRight" ? 1 : -1)];
    if (next) { event.preventDefault(); next.focus(); }
  }
});
for (const kind of ["mouseover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    const span = event.target.closest?.(".round");
    if (span) tip(span);
    else if (!event.target.closest?.("#tip")) $("#tip").hidden = true;
  });
}
$("#both").addEventListener("change", lanes);
$("#speculate").addEventListener("change", lanes);
$("#key").addEventListener("change", connect);
$("#theme").addEventListener("change", () => {
  document.documentElement.dataset.theme = $("#theme").value;
});
$("#clear").addEventListener("click", () => {
  state.running.forEach((stop) => stop.abort());
  state.turns = [];
  document.querySelectorAll(".log").forEach((log) => log.replaceChildren());
  $("#more").open = false;
  $("#prompt").focus();
});
lanes();
connect();
