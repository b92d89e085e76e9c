// Sets light or dark before anything is drawn, so that a dark page does not flash white. Not a module, because modules run later.
(() => {
  try {
    const chosen = localStorage.getItem("doctor-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Without storage the system's preference applies.
  }
})();
