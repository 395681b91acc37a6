// Tokens grouped into words: labels joined, columns summed, as in `TokenMap.group("words", sink_beside=True)`.

// A map of one output begins in words if its scores add up, as signed ones do; a matrix pairs token with token.
function beginsInWords(data) {
  return data.isSigned && data.words.length > 0 && data.biasShare.length === 1;
}

function inWords(data) {
  const { inTokens, outTokens, biasShare, setAside } = data;
  const nOut = biasShare.length;
  const nIn = inTokens.length;
  const { values, unit } = new Scores(data.scores, nOut, nIn);
  // An attention sink, the first token, is beside its word and not in it.
  const sink = setAside.length === 1 && setAside[0] === 0 ? 0 : null;
  const words = data.words.flatMap(([label, start, stop]) => {
    const tokens = Array.from({ length: stop - start }, (_, k) => start + k);
    if (start === sink && tokens.length > 1) return [{ label: inTokens[0], tokens: [0], isAside: true }, { label, tokens: tokens.slice(1) }];
    return [{ label, tokens, isAside: tokens.some((j) => setAside.includes(j)) }];
  });
  const sums = new Float32Array(nOut * words.length);
  for (let i = 0; i < nOut; i++) {
    words.forEach(({ tokens }, w) => (sums[i * words.length + w] = tokens.reduce((sum, j) => sum + values[i * nIn + j], 0)));
  }
  return {
    ...data,
    inTokens: words.map(({ label }) => label),
    outTokens: outTokens ?? inTokens,
    scores: { values: sums, unit },
    setAside: words.flatMap(({ isAside }, w) => (isAside ? [w] : [])),
    sums: data.sums.map((line) => line.replace("the tokens shown", "the words shown")),
    firstTokens: words.map(({ tokens }) => tokens[0]),
  };
}
