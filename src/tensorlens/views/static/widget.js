// A map in a notebook whose clicks go back to Python: which output, which target, which input.

function renderWidget({ model, el }) {
  const host = element("div");
  const outputs = model.get("outputs");
  const output = element("select", { "aria-label": "Output" }, outputs.map((token, k) => element("option", { value: k, text: `${k} ${visible(token)}` })));
  const field = (label, name) => {
    const input = element("input", { "aria-label": label, placeholder: label, size: 14 });
    input.addEventListener("change", () => send({ [name]: input.value }));
    return input;
  };
  const fields = { target: field("Target", "target"), against: field("Rather than", "against") };
  const error = element("span", { role: "status" });
  const row = element("div", { style: "display:flex;gap:.5em;flex-wrap:wrap;padding:.4em 0;font:14px system-ui" }, [
    element("label", {}, ["Output ", output]),
    ...(model.get("takes_target") ? Object.values(fields) : []),
    error,
  ]);
  const send = (values) => {
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    model.save_changes();
  };
  output.addEventListener("change", () => send({ out_token: Number(output.value) }));
  // Keys pressed here are not the notebook's.
  row.addEventListener("keydown", (event) => event.stopPropagation());
  const show = () => {
    output.value = model.get("out_token");
    for (const [name, input] of Object.entries(fields)) input.value = model.get(name);
    mount(host, model.get("data"));
  };
  host.addEventListener("tensorlens:select", ({ detail }) => send({ in_token: detail.inToken }));
  model.on("change:data", show);
  model.on("change:error", () => (error.textContent = model.get("error")));
  el.append(row, host);
  show();
}
