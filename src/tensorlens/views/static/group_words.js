// Tokens put together into words: labels joined, columns summed, as `TokenMap.words` does it.

function inWords(data) {
  const { words, inTokens, outTokens, biasShare } = data;
  const nOut = biasShare.length;
  const nIn = inTokens.length;
  const { values, unit } = new Scores(data.scores, nOut, nIn);
  const sums = new Float32Array(nOut * words.length);
  for (let i = 0; i < nOut; i++) {
    words.forEach(([, start, stop], w) => {
      let sum = 0;
      for (let j = start; j < stop; j++) sum += values[i * nIn + j];
      sums[i * words.length + w] = sum;
    });
  }
  const holds = ([, start, stop]) => data.setAside.some((j) => j >= start && j < stop);
  const setAside = words.flatMap((word, w) => (holds(word) ? [w] : []));
  return { ...data, inTokens: words.map(([label]) => label), outTokens: outTokens ?? inTokens, scores: { values: sums, unit }, setAside };
}
