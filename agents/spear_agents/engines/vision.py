"""Pictures for local vision-language models (Qwen2.5-VL): patches for the vision tower, and their tokens and positions
in a sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from spear_envs.core.errors import SpearError, first_line

if TYPE_CHECKING:
    import torch

MODEL_TYPE = "qwen2_5_vl"
_OUT_OF_REACH = -1e9
"""A logit of no probability; finite, since an entropy multiplies the two."""
LEAST_PIXELS = 256 * 256
"""Least area of a picture that a model is shown, as in verl-agent."""
_OPENING, _PLACE, _CLOSING = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


def has_vision(path: str | Path) -> bool:
    """Tell whether a model (folder or hub id) reads pictures. Raises SpearError for families other than Qwen2.5-VL."""
    try:
        if Path(path).is_dir():
            config = json.loads((Path(path) / "config.json").read_text("utf-8"))
        else:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()
    except (OSError, ValueError, RecursionError):  # not a model: reported on loading
        return False
    if "vision_config" not in config:
        return False
    if config.get("model_type") != MODEL_TYPE:
        raise SpearError(f"{path} is a {config.get('model_type')} model; only {MODEL_TYPE} can read pictures here")
    return True


def enlarge(image: np.ndarray) -> np.ndarray:
    """Return a picture as models are shown it: pixels are repeated until there are :data:`LEAST_PIXELS`.

    Qwen2.5-VL's processor would shrink a board of 96 pixels to 84, which are nine tokens.
    """
    factor = _find_factor(*image.shape[:2])
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def _find_factor(height: int, width: int) -> int:
    return max(1, math.ceil(math.sqrt(LEAST_PIXELS / (height * width))))


def fold_places(token_ids: Sequence[int], place: int) -> list[int]:
    """Return ids with one image token ``place`` for each picture, as vLLM takes them."""
    return [i for before, i in zip((None, *token_ids), token_ids, strict=False) if i != place or before != place]


class ImageReader:
    """The image side of a Qwen2.5-VL folder, shared by rollouts and the trainer.

    Pictures go through transformers' Pillow processor: the same patches with and without torchvision. Raises SpearError
    if ``config.json`` or ``preprocessor_config.json`` is missing or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoConfig, Qwen2VLImageProcessorPil  # here only: has_vision() needs none of it
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            raise SpearError(f"the image processor in {path} cannot be read: {first_line(error)}") from error
        self.image_token_id = int(config.image_token_id)
        self._merged = int(config.vision_config.spatial_merge_size) ** 2
        # The model's own rule of positions needs only its configuration.
        rule = SimpleNamespace(config=config)
        rule.get_vision_position_ids = MethodType(Qwen2_5_VLModel.get_vision_position_ids, rule)
        self._find_positions = MethodType(Qwen2_5_VLModel.get_rope_index, rule)

    def count_tokens(self, image: np.ndarray) -> int:
        """Return the number of tokens of a picture, uint8 [height, width, 3]."""
        height, width = image.shape[:2]
        factor = _find_factor(height, width)
        return int(self._processor.get_number_of_image_patches(factor * height, factor * width, {})) // self._merged

    def mark(self, image: np.ndarray) -> str:
        """Return the text of a picture: one image token for each merged patch, between the model's marks."""
        return _OPENING + _PLACE * self.count_tokens(image) + _CLOSING

    def forbid_places(self, logits: torch.Tensor) -> None:
        """Mask the image token in ``logits`` [..., V], in place, since a sampled one would not have a picture.

        Rollout and trainer both do this, so that they give the same log-probabilities.
        """
        logits[..., self.image_token_id] = _OUT_OF_REACH

    def read(self, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Return ``pixel_values`` [patches, values], float32, and ``image_grid_thw`` [pictures, 3]; empty for none."""
        if not len(images):
            return {}
        features = self._processor(images=[enlarge(image) for image in images], return_tensors="pt")
        return {name: features[name] for name in ("pixel_values", "image_grid_thw")}

    def find_positions(self, token_ids: torch.Tensor, grids: torch.Tensor | None) -> torch.Tensor:
        """Return the positions of one sequence of ids [T] in time, height and width: int64 [3, T].

        ``grids`` are ``image_grid_thw`` of its pictures; None for none. Raises SpearError if these do not match the
        image tokens.
        """
        kinds = (token_ids == self.image_token_id).int()[None]
        expected = 0 if grids is None else int(grids.prod(-1).sum()) // self._merged
        if int(kinds.sum()) != expected:
            raise SpearError(f"a sequence has {int(kinds.sum())} image tokens for pictures of {expected}")
        positions, _ = self._find_positions(token_ids[None], kinds, image_grid_thw=grids)
        return positions[:, 0]


def pack_pictures(images: Sequence[np.ndarray]) -> np.ndarray:
    """Pack pictures into uint8 [*]: their number, the length of each, and each as a PNG.

    Lossless and a fraction of the size of pixels; rows of packed pictures make a jagged tensor.
    """
    files = []
    for image in images:
        file = BytesIO()
        Image.fromarray(np.asarray(image, dtype=np.uint8)).save(file, "PNG", compress_level=1)
        files.append(file.getvalue())
    header = np.asarray([len(files), *map(len, files)], dtype="<i4").tobytes()
    return np.frombuffer(header + b"".join(files), dtype=np.uint8)


def unpack_pictures(packed: np.ndarray) -> list[np.ndarray]:
    """Unpack :func:`pack_pictures` to arrays uint8 [height, width, 3]."""
    data = np.ascontiguousarray(packed, dtype=np.uint8).tobytes()
    count = int(np.frombuffer(data, "<i4", 1)[0])
    at = 4 + 4 * count
    images = []
    for length in np.frombuffer(data, "<i4", count, 4).tolist():
        images.append(np.asarray(Image.open(BytesIO(data[at : at + length])).convert("RGB")))
        at += length
    return images


def key_pictures(images: Sequence[np.ndarray]) -> bytes:
    """Return the key of pictures; equal for equal ones."""
    return b"".join(repr(image.shape).encode() + image.tobytes() for image in images)


def read_rows(reader: ImageReader, rows: Sequence[Sequence[np.ndarray]]) -> list[dict[str, Any]]:
    """Call :meth:`ImageReader.read` for each row's pictures, once for equal rows (a group at its first turn)."""
    keys = list(map(key_pictures, rows))
    known = {key: reader.read(images) for key, images in dict(zip(keys, rows, strict=True)).items()}
    return [known[key] for key in keys]
