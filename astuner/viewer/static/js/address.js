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
  const response = await fetch(`api/${path}?${link("", query).slice(3)}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error ?? answer.detail?.[0]?.msg ?? "the server rejected the request");
  return answer;
}
