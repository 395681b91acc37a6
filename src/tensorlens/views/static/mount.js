// From a host element with its data to a living map. `mount` alone is for pages that bring their own data.

// `source` is the data before tokens were grouped into words; without it, the map chooses how it begins.
function mount(host, data, source = null) {
  if (source === null) return mount(host, beginsInWords(data) ? inWords(data) : data, data);
  const root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
  host.tensorlens?.gone.abort();
  const focused = root.activeElement?.getAttribute("aria-label"); // the switch that was used
  const lens = new MapLens(host, data, source);
  host.tensorlens = lens;
  root.replaceChildren(element("style", { text: STYLE }), lens.node);
  lens.applyShade();
  lens.layout();
  if (lens.texts) lens.mark(true);
  if (focused) lens.node.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  new ResizeObserver(() => lens.layout()).observe(lens.node);
  // Keys pressed in the map are not the notebook's: twice 0 would restart the kernel of JupyterLab.
  host.dataset.lmSuppressShortcuts = "true";
  lens.node.addEventListener("keydown", (event) => event.stopPropagation());
  return lens;
}

const KINDS = { map: mount, inside: (host, data) => (host.tensorlens = new Inside(host, data)), pairs: (host, data) => (host.tensorlens = new Pairs(host, data)) };

// A notebook may show one map twice and run the script once for each, so every waiting host is taken.
function mountWaiting(root) {
  for (const host of root.querySelectorAll("[data-tensorlens]:not([data-ready])")) {
    const source = host.querySelector('script[type="application/json"]');
    if (!source) continue;
    performance.mark("tensorlens:start");
    KINDS[host.dataset.tensorlens](host, JSON.parse(source.textContent));
    host.dataset.ready = "true";
    performance.measure("tensorlens", "tensorlens:start");
  }
}
