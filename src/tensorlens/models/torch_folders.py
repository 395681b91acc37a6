"""Bundled folders that hold a pickled state dict and a vocabulary, made into folders transformers can read.

The tokenizers of these models are Python classes inside packages that we do not run. They consist of one split and one
table, which a `tokenizer.json` can express.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tensorlens.models.bundled import Installed
from tensorlens.models.foreign_files import check_complete, check_config_file, check_zip

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def convert_torch_folder(source: Installed, target: Path) -> None:
    """Write a bundled torch folder as one that transformers reads."""
    import transformers

    folder, name, recipe = source.paths[0], source.bundled.name, source.bundled.recipe
    vocabulary = source.paths[1] if len(source.paths) > 1 else folder / "vocab.txt"
    check_config_file(name, folder / "config.json")
    check_zip(name, folder / "pytorch_model.bin")
    model, info = getattr(transformers, recipe.model).from_pretrained(folder, output_loading_info=True)
    check_complete(name, model, info["missing_keys"])
    # The configs of 2020 hold sampling settings, which a masked-token model refuses to save.
    model.generation_config = None
    model.save_pretrained(target)
    build_tokenizer(vocabulary, recipe.token, model.config.max_position_embeddings).save_pretrained(target)


def build_tokenizer(vocabulary: Path, pattern: str, max_length: int) -> PreTrainedTokenizerBase:
    """A tokenizer that cuts text by `pattern`, looks the pieces up, and frames them with [CLS] and [SEP].

    Args:
        vocabulary: One token per line; the number of its line is its id.
        pattern: Regular expression of one token. White space is dropped; anything else that does not match
            becomes [UNK], so that it shows.
        max_length: Longest input of the model.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **{f"{word}_token": f"[{word.upper()}]" for word in ("unk", "cls", "sep", "pad", "mask")},
    )
