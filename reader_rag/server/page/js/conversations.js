// Conversations as the server keeps them, and their list at the left.

import { callJson, call } from "./api.js";
import { counted, el, h, showError } from "./dom.js";

const SEARCH_MS = 180;
const path = (id) => `api/conversations/${encodeURIComponent(id)}`;

/** A conversation's address on the page. */
export const conversationHash = (id) => `#/conversations/${encodeURIComponent(id)}`;

export class Conversations {
  constructor() {
    this.current = null;
    this.kept = true;
    let timer = 0;
    el("conversation-search").addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.list(), SEARCH_MS);
    });
  }

  /** Draws the conversations that the search finds. */
  async list() {
    if (!this.kept) return;
    const asked = el("conversation-search").value.trim();
    let found;
    try {
      found = await callJson(`api/conversations${asked ? `?q=${encodeURIComponent(asked)}` : ""}`);
    } catch (error) {
      if (error.status === 404 || error.status === 501) this.withoutHistory();
      else showError(error);
      return;
    }
    if (asked !== el("conversation-search").value.trim()) return; // an answer to an older search
    el("conversations").replaceChildren(
      ...found.conversations.map(({ id, title }) =>
        h("li", {}, h("a", { href: conversationHash(id), text: title || "Untitled", title: title || null, data: { id } })),
      ),
    );
    el("conversations-empty").hidden = found.conversations.length > 0;
    el("conversations-empty").textContent = asked ? `Nothing found for “${asked}”.` : "Your conversations will be kept here.";
    this.mark(this.current);
  }

  withoutHistory() {
    this.kept = false;
    el("history").hidden = true;
  }

  /** Marks the conversation that is open. */
  mark(id) {
    this.current = id;
    for (const node of el("conversations").querySelectorAll("a")) {
      if (node.dataset.id === id) node.setAttribute("aria-current", "page");
      else node.removeAttribute("aria-current");
    }
  }

  load(id) {
    return callJson(path(id));
  }

  /** Keeps a conversation; returns its id, null where the server keeps none. */
  async save({ id, title, messages }) {
    if (!this.kept) return null;
    const json = { title, messages };
    const saved = id
      ? await callJson(path(id), { method: "PUT", json })
      : await callJson("api/conversations", { method: "POST", json });
    await this.list();
    return saved?.id ?? id;
  }

  async remove(id) {
    await call(path(id), { method: "DELETE" });
    await this.list();
  }

  /** Saves a conversation as a Markdown file. */
  async download({ id, title }) {
    const response = await call(`${path(id)}/export`);
    const url = URL.createObjectURL(new Blob([await response.arrayBuffer()], { type: "text/markdown" }));
    const name = title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "conversation";
    h("a", { href: url, download: `${name}.md` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }
}

/** A conversation's title: its first question, on one line. */
export function titleOf(question) {
  const line = question.replace(/\s+/g, " ").trim();
  const points = [...line];
  return points.length > 80 ? `${points.slice(0, 79).join("")}…` : line;
}

/** What a conversation has, for a screen reader. */
export const size = (messages) => counted(messages.filter((message) => message.role === "user").length, "question");
