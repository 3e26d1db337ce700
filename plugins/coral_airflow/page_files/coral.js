// Looks and comfort of Coral's page: theme, charts, filter, links out of Airflow's frame. The page is whole without it.
"use strict";
(() => {
  const root = document.documentElement;

  // Airflow's own choice (next-themes); "system" or nothing leaves it to the browser.
  const chosen = () => {
    try { return localStorage.getItem("theme"); } catch { return null; }
  };
  const applyTheme = () => {
    const theme = chosen();
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  };
  applyTheme();

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const merged = (given, more) => ({ ...more, ...given });

  const draw = (element) => {
    const figure = JSON.parse(element.dataset.figure);
    const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), automargin: true };
    const layout = merged(figure.layout, {
      margin: { l: 10, r: 10, t: 10, b: 30 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--dim"), family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: color("--card"), font: { color: color("--fg") } },
    });
    layout.xaxis = merged(figure.layout.xaxis, axis);
    layout.yaxis = merged(figure.layout.yaxis, { ...axis, rangemode: "tozero" });
    window.Plotly.react(element, figure.data, layout, { responsive: true, displayModeBar: false });
  };
  const drawAll = () => {
    if (window.Plotly) document.querySelectorAll("[data-figure]").forEach(draw);
  };

  const localTimes = () => {
    document.querySelectorAll("time[datetime]").forEach((element) => {
      const moment = new Date(element.dateTime);
      if (Number.isNaN(moment.getTime())) return;
      element.title = element.textContent;
      element.textContent = moment.toLocaleString();
    });
  };

  const filter = (input) => {
    const wanted = input.value.trim().toLowerCase();
    document.querySelectorAll(input.dataset.filter).forEach((element) => {
      const fits = element.textContent.toLowerCase().includes(wanted);
      element.hidden = !fits;
      if (wanted && fits) element.closest("details")?.setAttribute("open", "");
    });
  };

  // A sandboxed frame may not navigate the window around it, but that window's own links may.
  const openOutside = (event) => {
    const link = event.target.closest("a[data-top]");
    if (!link || window.parent === window) return;
    event.preventDefault();
    const outside = window.parent.document.createElement("a");
    outside.href = link.href;
    window.parent.document.body.append(outside);
    outside.click();
    outside.remove();
  };

  document.addEventListener("DOMContentLoaded", () => {
    localTimes();
    drawAll();
    document.querySelectorAll("input[data-filter]").forEach((input) => {
      input.addEventListener("input", () => filter(input));
    });
    document.addEventListener("click", openOutside);
  });
  window.addEventListener("storage", () => { applyTheme(); drawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
