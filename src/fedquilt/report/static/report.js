// The page about runs: draws its figures, and follows the server if there is one.
"use strict";
(function () {
  const plots = new Map();
  const holder = document.getElementById("figures");
  const embedded = document.getElementById("figure-data");

  function drawFigures(figures) {
    const seen = new Set();
    for (const figure of figures) {
      seen.add(figure.title);
      const plot = plots.get(figure.title);
      if (plot) plot.update(figure);
      else plots.set(figure.title, new FedquiltPlots.Plot(holder, figure));
      holder.append(plots.get(figure.title).root.parentNode === holder && isInOrder(figure.title) ? "" : plots.get(figure.title).root);
    }
    for (const [title, plot] of plots) if (!seen.has(title)) { plot.root.remove(); plots.delete(title); }
    document.body.dataset.figures = String(figures.length);
  }

  function isInOrder(title) {
    // moving an element would take the focus away from it: only new ones are moved
    return plots.get(title).root.isConnected;
  }

  // --- following a server ------------------------------------------------------------------------

  const source = document.body.dataset.source;
  let tag = null;

  function keepOpen(part, change) {
    const open = new Set([...part.querySelectorAll("details[open]")].map((d) => d.id));
    const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
    const scrolls = [...part.querySelectorAll(".scroll")].map((s) => s.scrollLeft);
    change();
    for (const details of part.querySelectorAll("details")) if (open.has(details.id)) details.open = true;
    if (focused) document.getElementById(focused)?.focus();
    [...part.querySelectorAll(".scroll")].forEach((s, i) => { s.scrollLeft = scrolls[i] || 0; });
  }

  async function follow() {
    const light = document.getElementById("connection");
    try {
      const headers = tag ? { "if-none-match": tag } : {};
      const reply = await fetch(source + location.search, { headers, cache: "no-store" });
      if (reply.status === 200) {
        tag = reply.headers.get("etag");
        const document_ = await reply.json();
        for (const [id, text] of Object.entries(document_.parts)) {
          const part = document.getElementById(id);
          if (part && part.innerHTML !== text) keepOpen(part, () => { part.innerHTML = text; });
        }
        drawFigures(document_.figures);
      } else if (reply.status !== 304) throw new Error(String(reply.status));
      light.textContent = "live";
      light.className = "good";
    } catch {
      light.textContent = "not connected";
      light.className = "bad";
    }
    setTimeout(follow, document.hidden ? 10000 : 1500);
  }

  if (embedded) drawFigures(JSON.parse(embedded.textContent));
  if (source) follow();
})();
