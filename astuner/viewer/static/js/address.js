// Addresses of pages: #/episode?run=a&episode=…; and questions to the server.

export function here() {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page || "runs", query: new URLSearchParams(query ?? "") };
}

export function link(page, query) {
  const kept = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") kept.append(key, one);
  }
  return `#/${page}?${kept}`;
}

// Change the address without drawing the page anew: so that what is seen can be sent to somebody.
export function note(changes) {
  const { page, query } = here();
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") query.delete(key);
    else query.set(key, value);
  }
  history.replaceState(null, "", `#/${page}?${query}`);
}

export async function ask(path, query = {}) {
  const response = await fetch(`api/${path}?${link("", query).slice(3)}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error ?? answer.detail?.[0]?.msg ?? "the server could not read the question");
  return answer;
}
