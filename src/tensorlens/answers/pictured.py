"""Prompts with pictures: chat messages that a processor renders, and outputs of a processor.

The tokens of a picture are columns of their own, each with the part of the picture that it covers. They
are not part of the text, which consists of all other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensorlens.answers.prompts import Offsets, Prompt, decoded, read_prompt, turns
from tensorlens.errors import InputError
from tensorlens.maps.groups import Group, find_regions
from tensorlens.models.inputs import ModelInput, forward_parameters
from tensorlens.models.pictures import Looking, find_pictures, is_picture, open_picture
from tensorlens.models.texts import tokenizer_of
from tensorlens.specimen import Specimen


def read_pictured(specimen: Specimen, prompt: Any) -> Prompt | None:
    """A prompt for a model that reads pictures, or of messages in parts; None for any other prompt."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        return _processed_prompt(specimen, prompt)
    if not isinstance(prompt, (list, tuple)) or not prompt or not isinstance(prompt[0], Mapping):
        return None
    in_parts = any(isinstance(one, Mapping) and isinstance(one.get("content"), list) for one in prompt)
    return _messages(specimen, prompt) if in_parts or _reads_pictures(specimen) else None


def _messages(specimen: Specimen, messages: Sequence[Any]) -> Prompt:
    """Chat messages with pictures, rendered by the processor's own template."""
    processor = specimen.processor
    parts = [list(_parts(one)) for one in messages]
    pictures = [_opened(part) for some in parts for part in some if part["type"] == "image"]
    if not _reads_pictures(specimen):
        if pictures:
            raise InputError(f"Got an image, but `{type(specimen.model).__name__}` and its processor take text only.")
        said = [
            {**one, "content": "".join(part["text"] for part in some)}
            for one, some in zip(messages, parts, strict=True)
        ]
        return read_prompt(specimen, said)
    template = getattr(processor, "chat_template", None) or getattr(tokenizer_of(processor), "chat_template", None)
    if not template:
        raise InputError(
            "Got chat messages, but the processor has no chat template. Pass the processor's output for text "
            "and images: lens.answer(processor(text=…, images=…, return_tensors='pt'))."
        )
    plain = [
        {**one, "content": [{"type": "image"} if part["type"] == "image" else part for part in some]}
        for one, some in zip(messages, parts, strict=True)
    ]
    try:
        own = {} if getattr(processor, "chat_template", None) else {"chat_template": template}
        text = processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **own)
        made = _processed(processor, text, pictures)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"The processor could not render the messages: {' '.join(str(error).split())}") from error
    texts = [[str(part["text"]) for part in some if part["type"] == "text"] for some in parts]
    roles = [str(one["role"]) for one in messages]
    return _prompt(specimen, made, pictures, list(zip(roles, texts, strict=True)))


def _processed_prompt(specimen: Specimen, made: Mapping[str, Any]) -> Prompt:
    """The output of a processor for text and pictures, for one sample."""
    ids = torch.as_tensor(made["input_ids"])
    if ids.dim() > 1 and len(ids) != 1:
        raise InputError(f"One answer is explained at a time; got a batch of {len(ids)} prompts.")
    return _prompt(specimen, made, (), ())


def _reads_pictures(specimen: Specimen) -> bool:
    return "pixel_values" in forward_parameters(specimen.model) and hasattr(specimen.processor, "tokenizer")


def _parts(message: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a message: {"type": "text", "text": …} or {"type": "image", …}."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not isinstance(message.get("role"), str):
        raise InputError(f'A chat message is {{"role": "user", "content": […]}}; got {message!r:.80}.')
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        is_text = kind == "text" and isinstance(part.get("text"), str)
        if not is_text and kind != "image":
            raise InputError(
                f'A part of a message is {{"type": "text", "text": …}} or {{"type": "image", "image": …}}; got '
                f"{part!r:.80}."
            )
        yield part


def _opened(part: Mapping[str, Any]) -> Any:
    given: Any = next((part[key] for key in ("image", "path", "url") if part.get(key) is not None), None)
    if is_picture(given):
        return given.convert("RGB")
    if isinstance(given, (str, Path)) and "://" not in str(given):
        return open_picture(Path(given))
    raise InputError(f"An image must be a PIL image or the path of a file; got {given!r:.60}.")


def _processed(processor: Any, text: str, pictures: Sequence[Any]) -> Mapping[str, Any]:
    """The model's arguments, with special tokens only once: many templates write the first one themselves."""
    first = getattr(tokenizer_of(processor), "bos_token", None)
    frame = {"add_special_tokens": False} if first and text.startswith(first) else {}
    images = {"images": [list(pictures)]} if pictures else {}
    return processor(text=[text], **images, **frame, return_tensors="pt")


def _prompt(
    specimen: Specimen, made: Mapping[str, Any], pictures: Sequence[Any], said: Sequence[tuple[str, Sequence[str]]]
) -> Prompt:
    """A prompt from the output of a processor, with its pictures and the texts of each turn."""
    if getattr(getattr(specimen.model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            f"`{type(specimen.model).__name__}` has an encoder; prompts with images need a decoder-only model."
        )
    prepared = specimen.prepare(dict(made))
    arguments = dict(prepared.arguments)
    ids = tuple(arguments.pop("input_ids")[0].tolist())
    of_ids = ModelInput(arguments={"input_ids": torch.tensor([ids])}, kind="processed")
    positions = of_ids.image_positions(specimen.model)
    if pictures and not positions:
        raise InputError(f"`{type(specimen.model).__name__}` reads images beside its tokens, which is not supported.")
    tokenizer = tokenizer_of(specimen.processor)
    looking = Looking(
        pictures=pictures,
        positions=positions,
        between=lambda start, stop: tokenizer.decode(list(ids[start:stop])) if tokenizer else "",
        arguments=arguments,
        config=getattr(specimen.model, "config", None),
        image_processor=getattr(specimen.processor, "image_processor", None),
    )
    text, offsets = _text_beside(specimen, ids, set(positions))
    return Prompt(
        ids=ids,
        text=text,
        offsets=offsets,
        turns=turns(text, said),
        has_special_tokens=False,
        arguments=arguments,
        pictures=find_pictures(looking),
    )


def _text_beside(specimen: Specimen, ids: Sequence[int], seen: set[int]) -> tuple[str, Offsets]:
    """The text of all tokens that are not those of pictures, and the place of each."""
    text, offsets, some = "", list[tuple[int, int] | None](), list[int]()
    for k, token in enumerate((*ids, None)):
        if token is not None and k not in seen:
            some.append(token)
            continue
        if some:
            piece, places = decoded(specimen, some)
            offsets += [pair and (pair[0] + len(text), pair[1] + len(text)) for pair in places]
            text, some = text + piece, []
        if token is not None:
            offsets.append(None)
    return text, tuple(offsets)


def beside(prompt: Prompt, n_answer: int) -> dict[str, Any]:
    """The further arguments for prompt and answer together."""
    arguments = dict[str, Any]()
    for name, value in prompt.arguments.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == len(prompt.ids):
            value = torch.cat([value, value.new_full((1, n_answer), _of_answer(name, value, prompt))], 1)
        arguments[name] = value
    return arguments


def _of_answer(name: str, value: Tensor, prompt: Prompt) -> int:
    """The value of a token of the answer in an argument with one number per token.

    The token type differs between models: some number pictures 1 (Gemma 3), others everything before an answer 0
    (PaliGemma, whose prompt is read in both directions).
    """
    if name == "attention_mask":
        return 1
    if not name.endswith("token_type_ids"):
        raise InputError(f"`{name}` has one number per token, and the answer's are unknown. Leave it out.")
    seen = [value[0, j] for picture in prompt.pictures for j in picture.tokens]
    return int(not any(seen)) if seen else int(value[0, -1])


def columns_of(prompt: Prompt, text: Sequence[Group], labels: Sequence[str], regions: Any) -> tuple[Group, ...]:
    """Groups of the text and of the pictures' tokens, in the order of the input.

    Pictures are cut by `regions` as in `find_regions`, or into their tokens if it is None.
    """
    found = list(text)
    for k, picture in enumerate(prompt.pictures):
        name = f"image {k + 1}: " if len(prompt.pictures) > 1 else ""
        if regions is None:
            numbered = [f"{name}patch {i}" if name else labels[j] for i, j in enumerate(picture.tokens)]
            found += [Group(label, (j,)) for label, j in zip(numbered, picture.tokens, strict=True)]
        else:
            cut = find_regions(regions, picture.boxes)
            found += [Group(name + one.label, tuple(picture.tokens[i] for i in one.tokens)) for one in cut]
    return tuple(sorted(found, key=lambda group: group.tokens[0]))


def picture_places(prompt: Prompt, columns: Sequence[Group]) -> list[dict[str, Any]]:
    """Each picture for a page that lays a map over it: its data URI, and the column and box of each token."""
    column_of = {j: k for k, group in enumerate(columns) for j in group.tokens}
    return [
        {
            "image": picture.image,
            "places": [
                [column_of[j], *box] for j, box in zip(picture.tokens, picture.boxes, strict=True) if box is not None
            ],
        }
        for picture in prompt.pictures
    ]
