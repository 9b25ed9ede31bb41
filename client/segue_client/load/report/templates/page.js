"use strict";
// Draws every plot of the page, in the colours of the page's style, again when the reader changes between light and dark.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const sources = [...document.querySelectorAll("script[data-plot]")];

  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return { text: of("--text"), line: of("--line"), ground: of("--ground") };
  };

  const coloured = (layout, { text, line, ground }) => {
    const axes = Object.keys(layout).filter((key) => /^[xy]axis/.test(key));
    const changed = Object.fromEntries(
      axes.map((key) => [key, { ...layout[key], gridcolor: line, linecolor: text, tickcolor: text }]),
    );
    const hoverlabel = { bgcolor: ground, bordercolor: line, font: { color: text } };
    const modebar = { ...layout.modebar, color: line, activecolor: text };
    return { ...layout, ...changed, hoverlabel, modebar, font: { color: text, family: "system-ui, sans-serif", size: 13 } };
  };

  const draw = () => {
    const theme = colours();
    for (const source of sources) {
      const { data, layout } = JSON.parse(source.textContent);
      const config = {
        responsive: true,
        displaylogo: false,
        showSendToCloud: false, // figures stay where they are
        plotlyServerURL: "",
        displayModeBar: "hover",
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      };
      Plotly.react(source.dataset.plot, data, coloured(layout, theme), config);
    }
  };

  draw();
  dark.addEventListener("change", draw);
})();
