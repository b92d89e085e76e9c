// Sets the theme before the first paint, so that a dark page does not flash white. Not a module, because modules are deferred.
(() => {
  try {
    const chosen = localStorage.getItem("doctor-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Without local storage the system's preference applies.
  }
})();
