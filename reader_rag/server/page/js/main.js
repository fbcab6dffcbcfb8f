// Puts the page together: session and key, addresses after the #, panels, keyboard.

import { callJson, setKey } from "./api.js";
import { Chat, fit } from "./chat.js";
import { Conversations, conversationHash } from "./conversations.js";
import { leaveDocument, openDocument } from "./document.js";
import { acceptDrops, Documents } from "./documents.js";
import { el, h, sentence, showError, toast } from "./dom.js";
import { race } from "./race.js";
import { drawSources, lightSpans } from "./sources.js";
import { placeOf } from "./text.js";

const app = el("app");
const narrow = matchMedia("(max-width: 820px)");
let session = null;
let documents = null;
let ready = Promise.resolve(); // settled when what the address names is shown
let opener = null; // where the focus was when a document was opened

const conversations = new Conversations();
const chat = new Chat({
  ready: () => ready,
  model: () => el("model").value,
  save: (conversation) => conversations.save(conversation),
  onid(id) {
    conversations.mark(id);
    if (!placeOf(location.hash)) history.replaceState(null, "", conversationHash(id));
  },
  onselect: () => showSide(),
  onrace: race,
  onchange: () => drawBar(),
});

// -- addresses --

async function route() {
  const hash = location.hash;
  const place = placeOf(hash);
  closeRail();
  if (place) {
    opener = document.activeElement;
    if (!chat.empty && app.dataset.view !== "documents") app.dataset.view = "chat";
    else if (app.dataset.view !== "documents") app.dataset.view = "document";
    show("document");
    await openDocument(place, leave);
    return;
  }
  leaveDocument();
  const wanted = /^#\/conversations\/([^/?]+)$/.exec(hash);
  app.dataset.view = hash === "#/documents" ? "documents" : "chat";
  el("documents").hidden = app.dataset.view !== "documents";
  el("chat").hidden = app.dataset.view !== "chat";
  app.dataset.sheet = "";
  if (app.dataset.view === "documents") {
    await documents?.load();
  } else if (wanted) {
    await openConversation(decodeURIComponent(wanted[1]));
  } else if (!chat.empty) {
    chat.clear();
    conversations.mark(null);
  }
  showSide();
  drawBar();
  if (opener?.isConnected) opener.focus();
  else if (app.dataset.view === "chat" && !narrow.matches) el("question").focus();
  opener = null;
}

async function openConversation(id) {
  if (chat.conversation.id === id) return;
  try {
    chat.show(await conversations.load(id));
    conversations.mark(id);
  } catch (error) {
    showError(error);
    history.replaceState(null, "", "#/");
    chat.clear();
  }
}

/** Closes the document: back to where it was opened from. */
function leave() {
  if (app.dataset.view === "documents") location.hash = "#/documents";
  else location.hash = chat.conversation.id ? conversationHash(chat.conversation.id) : "#/";
}

// -- panels --

function show(side) {
  app.dataset.side = side;
  el("side").hidden = side === "none";
  app.dataset.sheet = side === "document" ? "open" : "";
}

/** Shows the sources of the selected answer, if it has some. */
function showSide() {
  if (app.dataset.side === "document" && placeOf(location.hash)) return;
  const answer = chat.selected;
  const some = answer && (answer.cited.sources.length || answer.message.reader?.passages?.length);
  const wanted = app.dataset.view === "chat" && some && !answer.closed;
  if (wanted) drawSources(answer.cited, answer.message.reader, closeSources);
  show(wanted ? "sources" : "none");
  drawBar();
}

function closeSources() {
  if (narrow.matches) app.dataset.sheet = "";
  else {
    chat.selected.closed = true;
    showSide();
  }
  el("show-sources").focus();
}

el("show-sources").addEventListener("click", () => {
  chat.selected.closed = false;
  showSide();
  app.dataset.sheet = "open";
  el("side").querySelector("h2").focus();
});

function drawBar() {
  const inChat = app.dataset.view === "chat";
  const { id, title } = chat.conversation;
  el("title").textContent = inChat ? title || "New conversation" : "Documents";
  document.title = inChat && title ? `${title} – Reader` : "Reader";
  conversations.mark(inChat ? id : null);
  el("export").hidden = el("delete").hidden = !inChat || !id;
  const answer = chat.selected;
  const some = answer && (answer.cited.sources.length || answer.message.reader?.passages?.length);
  el("show-sources").hidden = !inChat || !some || (app.dataset.side === "sources" && !narrow.matches);
  el("welcome").hidden = !chat.empty;
  el("messages").hidden = chat.empty;
  if (app.dataset.view === "documents") el("documents-link").setAttribute("aria-current", "page");
  else el("documents-link").removeAttribute("aria-current");
}

function drawWelcome(count) {
  const docs = session.docs_model;
  const nodes = [];
  if (docs && !count) {
    nodes.push(
      h("h2", { text: "Add documents, then ask about them." }),
      h("p", { class: "lead", text: "Every stretch of an answer that is copied from a document is underlined and opens the document at those very characters." }),
      documents.dropzone("Choose files"),
    );
  } else {
    const lead = docs
      ? "What an answer copies is underlined in its document’s colour. A click opens the document at those characters."
      : "This server has no document store, so the model answers alone. Start it with --store to ask about documents.";
    nodes.push(h("h2", { text: docs ? "Ask your documents." : "Ask the model." }), h("p", { class: "lead", text: lead }));
  }
  el("welcome").replaceChildren(...nodes);
}

function openRail() {
  app.dataset.rail = "open";
  el("scrim").hidden = false;
  el("menu").setAttribute("aria-expanded", "true");
  el("rail-close").focus();
}

function closeRail() {
  if (app.dataset.rail !== "open") return;
  app.dataset.rail = "";
  el("scrim").hidden = true;
  el("menu").setAttribute("aria-expanded", "false");
  el("menu").focus();
}

el("menu").addEventListener("click", openRail);
el("rail-close").addEventListener("click", closeRail);
el("scrim").addEventListener("click", closeRail);
el("rail").addEventListener("click", (event) => event.target.closest("a") && closeRail());
narrow.addEventListener("change", drawBar);

// -- what a conversation's bar does --

el("export").addEventListener("click", () => conversations.download(chat.conversation).catch(showError));

el("delete").addEventListener("click", async () => {
  const { title, messages, id } = chat.conversation;
  try {
    await conversations.remove(id);
  } catch (error) {
    showError(error);
    return;
  }
  location.hash = "#/";
  const undo = async () => {
    const again = await conversations.save({ id: null, title, messages });
    if (again) location.hash = conversationHash(again);
  };
  toast(`Deleted “${title}”.`, { action: "Undo", seconds: 12, onaction: () => undo().catch(showError) });
});

el("theme").addEventListener("click", () => drawTheme(globalThis.readerTheme.toggle()));

function drawTheme(theme) {
  el("theme").textContent = theme === "dark" ? "Light" : "Dark";
  el("theme").setAttribute("aria-label", theme === "dark" ? "Switch to the light theme" : "Switch to the dark theme");
}

// -- session and key --

async function start() {
  try {
    session = await callJson("api/session");
  } catch (error) {
    if (error.status !== 401) el("welcome").replaceChildren(h("h2", { text: "The server does not answer." }), h("p", { class: "lead", text: sentence(error) }));
    return;
  }
  if (el("key-dialog").open) el("key-dialog").close();
  el("forget-key").hidden = session.auth !== "key";
  el("version").textContent = session.version;
  el("documents-link").hidden = !session.docs_model;
  const docs = session.docs_model;
  const models = [...session.models].sort((a, b) => Number(b === docs) - Number(a === docs));
  el("model").replaceChildren(
    ...models.map((name) => h("option", { value: name, text: name === docs ? `${docs.replace(/\+docs$/, "")} with your documents` : `${name} alone` })),
  );
  el("documents").replaceChildren();
  documents = docs
    ? new Documents({
        limits: () => session.limits,
        onchange(count) {
          el("documents-count").textContent = String(count);
          drawWelcome(count);
        },
      })
    : null;
  drawWelcome(0);
  drawBar();
  await Promise.all([conversations.list(), documents?.load()]);
  await route();
}

addEventListener("key-needed", ({ detail }) => {
  const dialog = el("key-dialog");
  el("key-error").textContent = detail.refused ? "The server does not know this key, or it was withdrawn." : "";
  if (!dialog.open) dialog.showModal();
  el("key").focus();
});
el("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
el("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(el("key").value.trim());
  el("key").value = "";
  ready = start().catch(showError);
});
el("forget-key").addEventListener("click", () => {
  setKey("");
  location.hash = "#/";
  location.reload();
});

// -- keyboard, drops --

addEventListener("keydown", (event) => {
  const typing = event.target instanceof Element && event.target.closest("input, textarea, select, dialog");
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (app.dataset.rail === "open") closeRail();
    else if (app.dataset.side === "document") leave();
    else if (chat.running) chat.stop();
    else if (app.dataset.sheet === "open") closeSources();
  } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey && !el("chat").hidden) {
    event.preventDefault();
    el("question").focus();
  }
});
el("skip").addEventListener("click", () => el("question").focus());
acceptDrops((files) => {
  if (!documents) {
    toast("This server has no document store; start it with --store to add documents.", { bad: true });
    return;
  }
  if (app.dataset.view !== "documents") location.hash = "#/documents";
  documents.add(files);
});
addEventListener("hashchange", () => {
  ready = route().catch(showError);
});
addEventListener("unhandledrejection", (event) => showError(event.reason));
lightSpans(document.body);
drawTheme(document.documentElement.dataset.theme);
fit();
ready = start().catch(showError);
