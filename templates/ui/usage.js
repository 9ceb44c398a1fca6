// The page of usage. When the server says that the hours have changed, the page is loaded again and takes its place.
import { replaceContent, watchPage } from "./reload.js";
import { byId } from "./text.js";

watchPage("/api/live/usage", JSON.parse(byId("data").textContent).cursor, (next) => {
  replaceContent(byId("content"), next.getElementById("content"));
});
document.documentElement.dataset.ready = "";
