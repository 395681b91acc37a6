"""Bundled folders that hold a pickled state dict and a vocabulary, made into folders transformers can read.

The tokenizers of these models are Python classes inside packages we do not run; what they do is one split and one
table, which a `tokenizer.json` can say.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tensorlens.errors import LoadError
from tensorlens.models.bundled import Installed
from tensorlens.models.cache import cache_key, convert_once
from tensorlens.models.foreign_files import check_config_file, check_zip, foreign_reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One SMILES token: a bracketed atom, an organic atom, a bond, a branch, a ring number, a reaction arrow.
SMILES_TOKEN = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"
AMINO_ACID = "."

REACTION_TOKEN = rf"%\([0-9]{{3}}\)|\||{SMILES_TOKEN}"

# Model class, pattern of one token.
_RECIPES = {
    "rxnmapper": ("AlbertForMaskedLM", SMILES_TOKEN),
    "antiberty": ("BertForMaskedLM", AMINO_ACID),
    "rxnfp": ("BertForSequenceClassification", REACTION_TOKEN),
}


def convert_torch_folder(source: Installed) -> Path:
    """The converted copy of a bundled torch folder, made on first use."""
    folder = source.paths[0]
    vocabulary = source.paths[1] if len(source.paths) > 1 else folder / "vocab.txt"
    files = [folder / "config.json", folder / "pytorch_model.bin", vocabulary]
    class_name, pattern = _RECIPES[source.bundled.name]

    def make(target: Path) -> None:
        import transformers

        check_config_file(source.bundled.name, files[0])
        check_zip(source.bundled.name, files[1])
        with foreign_reader(lambda said: f"{source.bundled.name}: the installed weights could not be read ({said})."):
            model, info = getattr(transformers, class_name).from_pretrained(folder, output_loading_info=True)
        if missing := sorted(info["missing_keys"]):
            raise LoadError(
                f"The weights of {source.bundled.name!r} should fill a {class_name}, but {missing} are missing. "
                f"Install the package again with: {source.bundled.install_line} --force-reinstall"
            )
        # The configs of 2020 hold sampling settings, which a masked-token model refuses to save.
        model.generation_config = None
        model.save_pretrained(target)
        build_tokenizer(vocabulary, pattern, model.config.max_position_embeddings).save_pretrained(target)

    return convert_once(cache_key(source.bundled.name, files, version=source.version), make)


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
