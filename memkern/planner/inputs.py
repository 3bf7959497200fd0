"""Makes a batch for a training step of a transformers model: finds its class, its inputs and its labels."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch

from ..techniques.options import not_allowed

TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "CAUSAL_LM", "SEQUENCE_CLASSIFICATION",
    "MASKED_LM", "CTC", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "SEMANTIC_SEGMENTATION",
)  # fmt: skip
"""transformers' auto classes, by which the class for a model type is found where its configuration names none."""
PER_SEQUENCE = ("Classification", "MultipleChoice", "NextSentencePrediction")
"""The ends of the names of classes with one label for each sequence."""
ALSO_NEEDED = {
    "input_ids": ("bbox", "mm_token_type_ids"),
    "input_features": ("attention_mask",),
    "pixel_values": ("spatial_shapes", "pixel_attention_mask", "image_embeds_position_mask"),
}
"""By a model's main input: other inputs that it needs, if its forward method has these arguments."""
SYNONYMS = {"inputs": ("pixel_values", "input_values")}
"""By a main input's generic name: names of the arguments that may take it."""
TOKENS = ("input_ids", "decoder_input_ids", "qformer_input_ids", "mm_token_type_ids", "bbox")
"""Inputs with one entry for each token of a sequence."""
DTYPES = dict.fromkeys((*TOKENS, "pixel_attention_mask", "attention_mask"), torch.long)
DTYPES |= dict.fromkeys(("image_embeds_position_mask", "bool_masked_pos"), torch.bool)
"""The dtypes of inputs that are not fp32."""
IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Attributes of configurations: the token that stands in a text for a patch of an image."""
CHOICES = 2  # of a multiple-choice question
TRANSCRIPT_TOKENS = 8
SAMPLES_PER_FRAME = 320
"""Samples of a waveform for each frame of the encoder, where the configuration does not say: wav2vec 2.0's."""


def architecture(config: Any) -> str:
    """The transformers class for a configuration: the one that it names, else the one for its model type."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return name
    name_for_type = class_of_type(config.model_type)
    if name_for_type is not None:
        return name_for_type
    allowed = "a type that transformers has for text or for the classification of images, video, audio or semantic"
    raise not_allowed("model", config.model_type, f"{allowed} segmentation; others as a module with inputs=")


def class_of_type(kind: str) -> str | None:
    """The class for a model type: that of the first of ``TASKS``, but no causal one where there is a masked one."""
    from transformers.models.auto import modeling_auto as auto

    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    for task in TASKS:
        cls = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).get(kind)
        if cls is not None and not (task == "CAUSAL_LM" and masked):
            return cls if isinstance(cls, str) else cls[0]
    return None


def text_config(config: Any) -> Any:
    """The configuration of the language model, where the class for a configuration of several models takes that."""
    import transformers

    name = architecture(config)
    if isinstance(config, getattr(transformers, name).config_class):
        return config
    config_of_text = copy.copy(config.get_text_config(decoder=True))
    config_of_text.architectures = [name]
    return config_of_text


def is_language_model(name: str) -> bool:
    """Whether a class of that name predicts each next token of its own sequence."""
    return name.endswith(("ForCausalLM", "LMHeadModel"))


class Inputs:
    """The inputs and labels that the class of a transformers configuration needs.

    seq_len: tokens of a sequence; frames of a spectrogram; of a waveform, the frames that the encoder makes of it.
    padded: whether sequences of tokens end in padding, which an attention mask marks.
    """

    def __init__(self, config: Any, seq_len: int, padded: bool = False) -> None:
        import transformers

        self.config, self.seq_len, self.padded = config, seq_len, padded
        self.name = architecture(config)
        self.cls = getattr(transformers, self.name)
        parameters = inspect.signature(self.cls.forward).parameters
        self.names = set(parameters)
        main = self.cls.main_input_name
        main = next((n for n in SYNONYMS.get(main, ()) if n in self.names), main)
        self.needed = {n for n, p in parameters.items() if p.default is p.empty} | {main}
        self.needed |= {*ALSO_NEEDED.get(main, ())} & self.names
        if main == "pixel_values" and self.name.endswith("ForConditionalGeneration"):
            # a text about the image
            self.needed |= {"input_ids"} & self.names
        if main == "input_ids" and "pixel_values" in self.names and not self.places_images:
            self.needed |= {"pixel_values"}
        if "return_loss" in self.names:  # as CLIP: the loss compares texts with images or sounds
            self.needed |= {"pixel_values", "input_features"} & self.names

    @property
    def places_images(self) -> bool:
        """Whether images stand in a text in place of tokens, so that there may be none."""
        return any(hasattr(self.config, name) for name in IMAGE_TOKENS)

    @property
    def takes_images(self) -> bool:
        """Whether it takes images and no text."""
        return "pixel_values" in self.needed and "input_ids" not in self.needed

    @property
    def takes_mask(self) -> bool:
        """Whether it takes tokens and an attention mask."""
        return "input_ids" in self.needed and "attention_mask" in self.names

    @property
    def _vision(self) -> Any:
        """The configuration of the part that reads images."""
        return getattr(self.config, "vision_config", self.config)

    @property
    def image(self) -> tuple[int, int, int]:
        """An image's channels, height and width."""
        config = self._vision
        side = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or 224
        height, width = side if isinstance(side, (tuple, list)) else (side, side)
        return getattr(config, "num_channels", 3), height, width

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        size = getattr(self._vision, "patch_size", None) or 16
        _, height, width = self.image
        size = size if isinstance(size, int) else size[-1]
        return (height // size) * (width // size)

    @property
    def _patch_values(self) -> int:
        """The number of values in a patch: channels x height x width."""
        side = getattr(self._vision, "patch_size", None) or 16
        return self.image[0] * side * side

    def batch(self, size: int) -> dict[str, Any]:
        """Inputs and labels of ``size`` sequences."""
        inputs: dict[str, Any] = {}
        for name in sorted(self.needed):
            if (shape := self._shape(name)) is not None:
                inputs[name] = torch.zeros(size, *shape, dtype=DTYPES.get(name, torch.float32))
        if "spatial_shapes" in self.needed:
            inputs["spatial_shapes"] = torch.full((size, 2), math.isqrt(self.patches))
        if "image_embeds_position_mask" in self.needed:
            inputs["image_embeds_position_mask"][:, : self.config.latent_query_num] = True
        if self.padded:
            mask = torch.ones_like(inputs["input_ids"])
            mask[..., -1] = 0
            inputs["attention_mask"] = mask
        inputs |= self._labels(size)
        if "decoder_input_ids" in self.names and not inputs.keys() & {"labels", "decoder_input_ids"}:
            inputs["decoder_input_ids"] = torch.zeros(size, self.seq_len, dtype=torch.long)
        if "use_cache" in self.names and is_language_model(self.name):
            inputs["use_cache"] = False
        return inputs

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of an input of one sequence; None where it is not known."""
        config = self.config
        if name in TOKENS:
            choices = (CHOICES,) if self.name.endswith("MultipleChoice") else ()
            return (*choices, self.seq_len, *((4,) if name == "bbox" else ()))
        if name == "pixel_values" and "spatial_shapes" in self.needed:
            return self.patches, self._patch_values
        if name in ("pixel_attention_mask", "bool_masked_pos"):
            return (self.patches,)
        if name == "flattened_patches":  # each with its row and column
            return self.patches, self._patch_values + 2
        if name == "image_embeds_position_mask":
            return (self.seq_len,)
        if name == "pixel_values_videos":
            return (getattr(config, "frames_per_clip", None) or config.num_frames, *self.image)
        if name == "pixel_values":
            frames = None if "ImageClassification" in self.name else getattr(config, "num_frames", None)
            return (*((frames,) if frames else ()), *self.image)
        if name == "input_values":
            bins = getattr(config, "num_mel_bins", None)
            if bins and hasattr(config, "max_length"):
                return config.max_length, bins
            ratio = getattr(config, "inputs_to_logits_ratio", None)
            return (self.seq_len * (ratio if isinstance(ratio, int) else SAMPLES_PER_FRAME),)
        if name == "input_features":
            return self._spectrogram
        return self._spectrogram[:1] if name == "attention_mask" else None

    @property
    def _spectrogram(self) -> tuple[int, int]:
        """The shape of a spectrogram: frames and bins of frequencies, the other way round for Whisper."""
        config = self.config
        for name in ("encoder_config", "audio_config"):
            config = getattr(config, name, config)
        bins = getattr(config, "input_feat_per_channel", None)
        if bins is not None:
            return self.seq_len, bins
        bins = getattr(config, "num_mel_bins", None) or 80
        if hasattr(config, "max_source_positions") and hasattr(config, "encoder_layers"):
            return bins, 2 * config.max_source_positions  # Whisper pads to its window
        return self.seq_len, bins

    def _labels(self, size: int) -> dict[str, Any]:
        """The labels of ``size`` sequences, by the names of the class's arguments."""

        def numbers(*shape: int) -> Any:
            return torch.zeros(size, *shape, dtype=torch.long)

        names = self.names
        if {"start_positions", "end_positions"} <= names:
            return {"start_positions": numbers(), "end_positions": numbers()}
        labels = {"return_loss": True} if "return_loss" in names and "labels" not in names else {}
        if "next_sentence_label" in names:
            labels["next_sentence_label"] = numbers()
        if "labels" not in names:
            return labels
        if self.name.endswith("SemanticSegmentation"):
            return labels | {"labels": numbers(*self.image[1:])}
        if self.name.endswith("ForCTC"):
            return labels | {"labels": numbers(TRANSCRIPT_TOKENS)}
        of_tokens = self.name.endswith("TokenClassification") or "logits_to_keep" in names
        if self.name.endswith(PER_SEQUENCE) and not of_tokens:
            return labels | {"labels": numbers()}
        return labels | ({} if self.takes_images else {"labels": numbers(self.seq_len)})
