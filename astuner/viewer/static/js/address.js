// Addresses of pages, such as #/episode?run=a&episode=…, and requests to the server.

import { answerFromSnapshot, snapshot } from "./snapshot.js";

export function currentAddress() {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page || "runs", query: new URLSearchParams(query ?? "") };
}

export function link(page, query) {
  const parameters = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const item of [value].flat()) if (item !== null && item !== undefined && item !== "") parameters.append(key, item);
  }
  return `#/${page}?${parameters}`;
}

// Update the address without redrawing the page, so that the address can be shared.
export function updateAddress(changes) {
  const { page, query } = currentAddress();
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") query.delete(key);
    else query.set(key, value);
  }
  history.replaceState(null, "", `#/${page}?${query}`);
}

export async function fetchJson(path, query = {}) {
  if (snapshot) return answerFromSnapshot(path, query);
  return answerOf(await send(`api/${path}?${link("", query).slice(3)}`));
}

// Send a JSON document to the server, which accepts it from this page only.
export async function postJson(path, query, value) {
  const headers = { "Content-Type": "application/json" };
  return answerOf(await send(`api/${path}?${link("", query).slice(3)}`, { method: "POST", headers, body: JSON.stringify(value) }));
}

async function send(address, options) {
  try {
    return await fetch(address, options);
  } catch {
    throw new Error("The viewer does not answer. Check that astuner view is still running in its terminal.");
  }
}

async function answerOf(response) {
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new Error(`The viewer answered with an error (${response.status}); its terminal has the details.`);
  }
  if (!response.ok) throw new Error(answer.error ?? answer.detail?.[0]?.msg ?? "the server rejected the request");
  return answer;
}
