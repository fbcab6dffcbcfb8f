// Calls of the server: the key, errors as sentences, server-sent events, uploads with progress.

const KEY = "reader-key";
const UNREACHABLE = "The server does not answer; see whether `reader-rag serve` is still running";
let key = stored();

/** What went wrong with a call, in one sentence. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {number} status HTTP status; 0 where no answer came.
   * @param {string|null} code The server's name for it.
   */
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Keeps a key for this tab; an empty one forgets it. */
export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // storage is switched off: the key holds until the page is left
  }
}

const address = (path) => new URL(path, document.baseURI.split("#")[0]);
const headers = (more = {}) => (key ? { Authorization: `Bearer ${key}`, ...more } : more);

/**
 * Calls the server.
 * @param {string} path Relative to the page.
 * @param {{method?: string, json?: any, signal?: AbortSignal}} options
 * @returns {Promise<Response>} An answer with a good status.
 */
export async function call(path, { method = "GET", json, signal } = {}) {
  const init = { method, signal, headers: headers(json === undefined ? {} : { "Content-Type": "application/json" }) };
  if (json !== undefined) init.body = JSON.stringify(json);
  let response;
  try {
    response = await fetch(address(path), init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(UNREACHABLE);
  }
  if (!response.ok) throw failure(response.status, await response.text().catch(() => ""), response.headers);
  return response;
}

/** Calls the server for JSON; null for an answer without a body. */
export async function callJson(path, options) {
  const response = await call(path, options);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

function failure(status, body, fields) {
  let detail = null;
  try {
    detail = JSON.parse(body).error;
  } catch {
    detail = null; // not from this server: a proxy in between
  }
  if (status === 401) window.dispatchEvent(new CustomEvent("key-needed", { detail: { refused: Boolean(key) } }));
  const wait = fields?.get("Retry-After");
  const message = detail?.message ?? `The server answered with status ${status}`;
  const again = status === 429 && wait ? `${message.replace(/[.]$/, "")}; try again in ${wait} s` : message;
  return new ApiError(again, status, detail?.code ?? null);
}

/**
 * The events of a server-sent stream.
 * @param {Response} response
 * @returns {AsyncGenerator<{event: string, data: string}>}
 */
export async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection broke before the answer was complete");
      });
      rest += done ? "\n" : value;
      // A lone CR at the end may be the first half of CR LF.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event: event || "message", data: data.join("\n") };
          event = "";
          data = [];
        } else if (!line.startsWith(":")) {
          const colon = line.indexOf(":");
          const field = colon < 0 ? line : line.slice(0, colon);
          const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
          if (field === "data") data.push(text);
          else if (field === "event") event = text;
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // it may be broken already
  }
}

/**
 * Sends files.
 * @param {string} path
 * @param {File[]} files
 * @param {(sent: number, total: number) => void} onprogress Bytes.
 * @returns {Promise<any>} The server's JSON.
 */
export function upload(path, files, onprogress) {
  const form = new FormData();
  for (const file of files) form.append("files", file, file.name);
  const request = new XMLHttpRequest();
  request.open("POST", address(path));
  for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
  request.upload.addEventListener("progress", (event) => onprogress(event.loaded, event.total));
  return new Promise((resolve, reject) => {
    request.addEventListener("load", () => {
      if (request.status >= 200 && request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(failure(request.status, request.responseText, { get: (name) => request.getResponseHeader(name) }));
    });
    request.addEventListener("error", () => reject(new ApiError(UNREACHABLE)));
    request.send(form);
  });
}
