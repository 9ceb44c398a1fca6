// For pages that the server renders: when it says that a page has changed, the page is loaded again.
import { watch } from "./live.js";

const REST = 4; // between two loads, times the seconds that a load takes: a page that is slow to build loads seldom

// Call show(next), with the page's new document, for each change of the topic at `url` since `cursor`.
export function watchPage(url, cursor, show) {
  let isLoading = false;
  let isStale = false;

  async function load() {
    isStale = true;
    if (isLoading) return;
    isLoading = true;
    try {
      while (isStale) {
        isStale = false;
        const started = performance.now();
        const html = await fetchPage();
        if (html !== null) show(new DOMParser().parseFromString(html, "text/html"));
        await new Promise((resolve) => setTimeout(resolve, REST * (performance.now() - started)));
      }
    } finally {
      isLoading = false;
    }
  }
  watch(url, cursor, load);
}

async function fetchPage() {
  try {
    const answer = await fetch(location.href);
    // The page says what is wrong: a run was deleted or is damaged. Without a valid token, live.js does.
    if (answer.status !== 401 && !answer.ok) location.reload();
    return answer.ok ? await answer.text() : null;
  } catch {
    return null; // The connection is lost, which live.js says. The next change loads the page.
  }
}

// Give an element the content of `next`; the focus stays on the same link.
export function replaceContent(element, next) {
  if (next.isEqualNode(element)) return; // the reader's selection stays
  const links = () => [...element.querySelectorAll("a")];
  const focused = links().find((link) => link === document.activeElement)?.href;
  element.replaceChildren(...next.childNodes);
  if (focused) links().find((link) => link.href === focused)?.focus({ preventScroll: true });
}
