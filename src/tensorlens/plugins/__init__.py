"""Plug-ins for other packages: each file imports its own host, and none is imported here.

| file | host | what it provides |
|---|---|---|
| `captum` | captum | `TensorAttribution`, `LLMTensorAttribution`: classes with `attribute` |
| `inseq` | inseq | the attribution method ``"tensorlens"`` |
| `transformer_lens` | TransformerLens | a bridge as a model, hook names of components |
| `nnsight` | nnsight | a wrapped model as a model, inputs of a trace |
| `sentence_transformers` | sentence-transformers | pair maps behind `model.similarity` |
"""
