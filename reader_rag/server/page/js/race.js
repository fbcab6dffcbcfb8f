// The race: one prompt decoded with drafts and plainly, one after the other; both recorded time lines are played together.

import { drawAnswer, round } from "./answer.js";
import { ApiError, call, serverEvents } from "./api.js";
import { counted, el, h, sentence } from "./dom.js";

const STATES = {
  reader: "Decoding with drafts from your documents …",
  plain: "Decoding the same prompt plainly, one token at a time …",
};

/**
 * Runs a race in a dialog.
 * @param {{role: string, content: string}[]} messages Up to the question.
 * @param {string} model
 */
export async function race(messages, model) {
  const dialog = el("race-dialog");
  const stopping = new AbortController();
  const player = { frame: 0 };
  const close = h("button", { type: "button", class: "icon", "aria-label": "Close the race", text: "✕", onclick: () => dialog.close() });
  const head = h(
    "div",
    { class: "race-head" },
    h("div", {}, h("h2", { id: "race-title", text: "Race against plain decoding" }), h("p", { class: "quiet", text: "The same prompt, decoded twice with nothing else running, then played side by side." })),
    close,
  );
  const status = h("p", { class: "waiting", role: "status", text: "Preparing …" });
  dialog.replaceChildren(head, status);
  dialog.addEventListener("close", () => (stopping.abort(), cancelAnimationFrame(player.frame)), { once: true });
  dialog.showModal();
  try {
    const json = { model, messages: messages.map(({ role, content }) => ({ role, content })) };
    const response = await call("api/race", { method: "POST", json, signal: stopping.signal });
    const result = await run(response, (state) => (status.textContent = STATES[state] ?? state));
    dialog.replaceChildren(head, ...lanes(result, player));
    dialog.querySelector("#race-again").focus();
  } catch (error) {
    if (error.name === "AbortError") return;
    status.className = "waiting error";
    status.textContent = sentence(error);
  }
}

async function run(response, onstate) {
  for await (const { data } of serverEvents(response)) {
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 0, event.error.code);
    if (event.result) return event.result;
    onstate(event.state);
  }
  throw new ApiError("The connection broke before the race was over");
}

function lanes(result, player) {
  const reader = lane("reader", "With drafts", result.reader);
  const plain = lane("plain", "Plain decoding", result.plain);
  const said = h("p", { class: "verdict", role: "status" });
  const start = () => {
    said.replaceChildren();
    play([reader, plain], player, () => said.replaceChildren(...verdict(result)));
  };
  const again = h("button", { type: "button", class: "button", id: "race-again", text: "Play again", onclick: start });
  start();
  return [h("div", { class: "race-lanes" }, reader.node, plain.node), h("div", { class: "race-foot" }, said, again)];
}

/** Whether the tokens agree, and how much sooner the drafted answer was complete. */
function verdict(result) {
  const factor = duration(result.plain) / duration(result.reader);
  const speed = factor >= 1 ? `${factor.toFixed(1)} times as fast.` : `Drafts were slower here: ${factor.toFixed(2)} times the speed.`;
  const same = result.agree
    ? `Both gave the same ${counted(result.reader.tokens, "token")}.`
    : `The tokens differ${Number.isInteger(result.first_difference) ? ` from token ${result.first_difference + 1} on` : ""}; in 16-bit types rounding can decide a tie.`;
  return [h("span", { class: "factor", text: speed }), ` ${same}`];
}

const duration = (side) => Math.max(1e-6, side.events.at(-1)?.[0] ?? 0);

function lane(name, title, side) {
  const text = h("div", { class: "text answer-text", tabindex: "0", role: "region", "aria-label": `${title}: the answer` });
  const figures = h("p", { class: "figures" });
  const bar = h("span");
  const node = h("section", { class: `lane ${name}` }, h("h3", { text: title }), figures, h("div", { class: "track", "aria-hidden": "true" }, bar), text);
  const last = duration(side);
  let drawn = null;
  return {
    node,
    last,
    /** Draws the lane as it was `seconds` after its start. */
    draw(seconds) {
      const now = Math.min(seconds, last);
      const shown = side.events.filter(([at]) => at <= now).map(([, piece]) => piece).join("");
      if (shown !== drawn) {
        drawn = shown;
        drawAnswer(text, shown);
        text.scrollTop = text.scrollHeight;
      }
      bar.style.width = `${(100 * now) / last}%`;
      const speed = seconds >= last ? ` · ${round(side.tokens_per_second)} tokens/s` : "";
      figures.textContent = `${now.toFixed(1)} s${speed}`;
    },
  };
}

function play(all, player, onend) {
  cancelAnimationFrame(player.frame);
  const end = Math.max(...all.map((one) => one.last));
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
    all.forEach((one) => one.draw(end));
    onend();
    return;
  }
  const begin = performance.now();
  const step = () => {
    const seconds = (performance.now() - begin) / 1000;
    all.forEach((one) => one.draw(seconds));
    if (seconds < end) player.frame = requestAnimationFrame(step);
    else onend();
  };
  step();
}
