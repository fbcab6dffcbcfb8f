// The conversation: questions, answers as they are streamed, their figures and sources.

import { citations, drawAnswer, figures } from "./answer.js";
import { ApiError, call, serverEvents } from "./api.js";
import { announce, counted, el, h, sentence, toast } from "./dom.js";
import { titleOf } from "./conversations.js";

const DRAW_MS = 50; // between two drawings of a streamed answer
const COPIED = "Copied: tokens that the model took over from drafts out of its prompt, the documents or kept texts";
const NEAR = 90; // pixels from the end within which the view follows the answer

/**
 * @typedef {{role: string, content: string, annotations?: Object[], reader?: Object}} Message As the server keeps it.
 */

export class Chat {
  /**
   * @param {{ready: () => Promise<void>, model: () => string, save: (conversation: Object) => Promise<string|null>, onid: (id: string) => void,
   *   onselect: (answer: Object|null) => void, onrace: (messages: Message[], model: string) => void,
   *   onchange: () => void}} host
   */
  constructor(host) {
    this.host = host;
    this.running = null;
    this.reset();
    el("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(el("question").value);
    });
    el("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        el("composer").requestSubmit();
      }
    });
    el("question").addEventListener("input", fit);
    el("stop").addEventListener("click", () => this.stop());
  }

  /** Begins a new conversation. */
  clear() {
    this.stop();
    this.reset();
    el("messages").replaceChildren();
    this.host.onselect(null);
  }

  reset() {
    this.conversation = { id: null, title: "", messages: [] };
    this.answers = [];
    this.selected = null;
  }

  /** Shows a kept conversation. */
  show({ id, title, messages }) {
    this.clear();
    this.conversation = { id, title, messages };
    let asked = null;
    messages.forEach((message, index) => {
      if (message.role === "user") {
        asked = index;
        el("messages").append(question(message.content));
      } else if (message.role === "assistant") {
        const answer = this.newAnswer(asked === null ? [] : messages.slice(0, asked + 1));
        this.finish(answer, message);
      }
    });
    el("scroller").scrollTop = el("scroller").scrollHeight;
  }

  get empty() {
    return this.conversation.messages.length === 0;
  }

  /** Asks a question, and streams its answer. */
  async ask(text) {
    const content = text.trim();
    if (!content || this.running || this.asking) return;
    this.asking = true; // the conversation that the address names may still be on its way
    await this.host.ready();
    this.asking = false;
    if (this.running || !this.host.model()) return;
    const conversation = this.conversation;
    el("question").value = "";
    fit();
    conversation.title ||= titleOf(content);
    conversation.messages.push({ role: "user", content });
    el("messages").append(question(content));
    const answer = this.newAnswer([...conversation.messages]);
    answer.node.dataset.state = "streaming";
    answer.text.append(h("p", { class: "waiting", text: "Reading …" }));
    el("scroller").scrollTop = el("scroller").scrollHeight;
    this.host.onchange();
    const stopping = new AbortController();
    this.busy({ stopping, answer });
    announce("The answer is being written.");
    const message = { role: "assistant", content: "", annotations: [], reader: null };
    let error = null;
    try {
      // Kept from the first words on, so that the address holds when the page is left.
      await this.stream(answer, message, stopping.signal, () => this.keep(conversation));
    } catch (raised) {
      error = raised;
    }
    if (this.running?.answer === answer) this.busy(null);
    const stopped = error?.name === "AbortError";
    if (error && !stopped && !message.content) {
      this.refused(conversation, answer, content, error);
      return;
    }
    if (stopped) message.reader = { ...message.reader, notes: ["Stopped before it was complete."] };
    conversation.messages.push(message);
    if (this.conversation === conversation) {
      this.finish(answer, message);
      if (error && !stopped) answer.node.append(h("p", { class: "error", role: "alert", text: sentence(error) }));
    }
    await this.keep(conversation);
  }

  async stream(answer, message, signal, onbegin) {
    const messages = answer.asked.map(({ role, content }) => ({ role, content }));
    const json = { model: this.host.model(), messages, stream: true, temperature: 0 };
    answer.model = json.model;
    const response = await call("v1/chat/completions", { method: "POST", json, signal });
    let drawn = 0;
    let waiting = 0;
    const draw = () => {
      waiting = 0;
      drawn = performance.now();
      if (signal.aborted || answer.node.dataset.state !== "streaming") return;
      this.following(() => drawAnswer(answer.text, message.content));
    };
    try {
      for await (const { data } of serverEvents(response)) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, 0, event.error.code);
        const delta = event.choices?.[0]?.delta;
        if (delta?.annotations) message.annotations.push(...delta.annotations);
        if (event.reader) message.reader = event.reader;
        if (delta?.content) {
          if (!message.content) onbegin();
          message.content += delta.content;
          waiting ||= setTimeout(draw, Math.max(0, drawn + DRAW_MS - performance.now()));
        }
      }
    } finally {
      clearTimeout(waiting);
    }
    throw new ApiError("The connection broke before the answer was complete");
  }

  /** An answer that never began: the question goes back to where it was typed. */
  refused(conversation, answer, content, error) {
    conversation.messages.pop();
    if (this.conversation !== conversation) return;
    answer.node.previousElementSibling.remove();
    answer.node.remove();
    this.answers = this.answers.filter((other) => other !== answer);
    if (!el("question").value) el("question").value = content;
    fit();
    this.host.onchange();
    toast(sentence(error), { bad: true, seconds: 15 });
    el("question").focus();
  }

  /** Keeps a conversation as it is then, after what is being kept of it already. */
  keep(conversation) {
    conversation.kept = (conversation.kept ?? Promise.resolve()).then(() => this.save(conversation));
    return conversation.kept;
  }

  async save(conversation) {
    try {
      const id = await this.host.save(conversation);
      const fresh = conversation.id === null && id !== null;
      conversation.id = id ?? conversation.id;
      if (fresh && this.conversation === conversation) this.host.onid(id);
    } catch (error) {
      toast(`This conversation is not kept: ${sentence(error)}`, { bad: true });
    }
    this.host.onchange();
  }

  stop() {
    this.running?.stopping.abort();
    this.busy(null);
  }

  busy(running) {
    const focused = document.activeElement === el("stop");
    this.running = running;
    el("send").hidden = running !== null;
    el("stop").hidden = running === null;
    if (focused) el("question").focus();
  }

  newAnswer(asked) {
    const text = h("div", { class: "answer-text" });
    const foot = h("div", { class: "answer-foot" });
    const node = h("li", { class: "answer", "aria-label": "Answer" }, text, foot);
    const answer = { node, text, foot, asked, cited: { spans: [], sources: [] }, message: null, model: null };
    el("messages").append(node);
    this.answers.push(answer);
    // A link of an older answer brings its own sources to the panel.
    node.addEventListener("focusin", () => this.select(answer));
    return answer;
  }

  finish(answer, message) {
    answer.message = message;
    answer.cited = citations(message.content, message.annotations);
    answer.node.dataset.state = "done";
    const notes = message.reader?.notes ?? [];
    const { spans, sources } = answer.cited;
    this.following(() => {
      drawAnswer(answer.text, message.content, spans);
      if (!message.content.trim()) answer.text.replaceChildren(h("p", { class: "quiet", text: "The model gave an empty answer." }));
      answer.foot.replaceChildren(h("span", { class: "stats", text: figures(message.reader), title: COPIED }), ...this.actions(answer));
      if (notes.length) answer.node.append(h("p", { class: "notes", text: notes.map(sentence).join(" ") }));
    });
    this.select(answer);
    const told = sources.length ? `${counted(spans.length, "copied span")} from ${counted(sources.length, "document")}.` : "";
    announce(`The answer is complete. ${told}`);
  }

  actions(answer) {
    const button = (text, onclick, label = null) => h("button", { type: "button", class: "text", text, onclick, "aria-label": label });
    const copy = button("Copy", async () => {
      try {
        await navigator.clipboard.writeText(answer.message.content);
        copy.textContent = "Copied";
        setTimeout(() => (copy.textContent = "Copy"), 1500);
      } catch {
        toast("This browser does not let the page copy; select the text instead.", { bad: true });
      }
    });
    const race = button("Race", () => this.host.onrace(answer.asked, answer.model ?? this.host.model()), "Race against plain decoding");
    return answer.asked.length ? [copy, race] : [copy];
  }

  /** Brings an answer's sources to the panel. */
  select(answer) {
    if (this.selected === answer || !answer.message) return;
    this.selected?.node.classList.remove("selected");
    this.selected = answer;
    answer.node.classList.add("selected");
    this.host.onselect(answer);
  }

  /** Changes the messages; the view follows where it was at the end. */
  following(change) {
    const view = el("scroller");
    const near = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR;
    change();
    if (near) view.scrollTop = view.scrollHeight;
  }
}

const question = (content) => h("li", { class: "question", text: content, "aria-label": "Question" });

/** Makes the question's box as high as its text. */
export function fit() {
  const box = el("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
