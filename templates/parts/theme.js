// The button that changes between the light and the dark theme, and the page in print. Expects theme.css.
//   wireTheme(button);  // the system's theme applies until the button is used
import { redrawAll } from "./axis.js";

export function wireTheme(button) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const update = () => {
    button.textContent = dark() ? "Light theme" : "Dark theme";
    redrawAll();
  };
  button.onclick = () => {
    root.dataset.theme = dark() ? "light" : "dark";
    update();
  };
  button.hidden = false;
  system.addEventListener("change", update);
  let screen = null; // the screen's theme while the page is printed in light colors
  addEventListener("beforeprint", () => {
    screen ??= { theme: root.dataset.theme };
    root.dataset.theme = "light";
    redrawAll();
  });
  addEventListener("afterprint", () => {
    if (!screen) return;
    if (screen.theme) root.dataset.theme = screen.theme;
    else delete root.dataset.theme;
    screen = null;
    redrawAll();
  });
  update();
}
