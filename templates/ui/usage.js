// The page of usage. When the server says that the hours have changed, the page is loaded again and takes its place.
import { watch } from "./live.js";
import { byId } from "./text.js";

const content = byId("content");
let isLoading = false;
let isStale = false;

async function load() {
  isStale = true;
  if (isLoading) return;
  isLoading = true;
  try {
    while (isStale) {
      isStale = false;
      const html = await fetchPage();
      if (html !== null) show(html);
    }
  } finally {
    isLoading = false;
  }
}

async function fetchPage() {
  try {
    const answer = await fetch(location.href);
    return answer.ok ? await answer.text() : null;
  } catch {
    return null; // The connection is lost, which live.js says. The next change loads the page.
  }
}

function show(html) {
  const next = new DOMParser().parseFromString(html, "text/html").getElementById("content");
  if (next.isEqualNode(content)) return; // the reader's selection stays
  const links = () => [...content.querySelectorAll("a")];
  const focused = links().find((link) => link === document.activeElement)?.href;
  content.replaceChildren(...next.childNodes);
  if (focused) links().find((link) => link.href === focused)?.focus({ preventScroll: true });
}

watch("/api/live/usage", JSON.parse(byId("data").textContent).cursor, load);
document.documentElement.dataset.ready = "";
