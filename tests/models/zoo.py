"""Small random versions of real architectures: `ZOO` is the list, `Entry.build()` and `Entry.inputs()` make one.

An entry is data: a model type of `transformers`, fields of its configuration where the general rules of `shrink` do
not do, and the kind of its inputs. What an entry exercises is measured by tests/models/oracle.py, not claimed here.
"""

import dataclasses
import functools
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.models import inputs as kinds
from tests.models.build import build, reference


@functools.cache
def architectures() -> dict[str, str]:
    """model_type -> class name, over AutoModel and, for types without a base model, the heads."""
    found: dict[str, str] = {}
    for mapping in [modeling_auto.MODEL_MAPPING_NAMES] + [
        getattr(modeling_auto, name)
        for name in sorted(vars(modeling_auto))
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
    ]:
        for model_type, name in mapping.items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One architecture. `essential` entries count in the totals, the others run beside them."""

    name: str
    model_type: str
    family: str
    kind: str
    overrides: tuple[tuple[str, Any], ...] = ()
    reference_overrides: tuple[tuple[str, Any], ...] = ()  # where a model refuses float64
    gain: float = 1.5
    essential: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def model_class(self) -> type:
        """The class behind AutoModel, or behind an AutoModelFor... where there is no base model."""
        return getattr(transformers, architectures()[self.model_type])

    def build(self) -> torch.nn.Module:
        """The model: random from a fixed seed, float32, eval mode, eager attention."""
        return build(self.model_class, gain=self.gain, **dict(self.overrides))

    def reference(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        """What `model` computes in float64."""
        if self.reference_overrides:
            other = build(self.model_class, gain=self.gain, **dict(self.overrides + self.reference_overrides))
            other.load_state_dict(model.state_dict())
            model = other
        return reference(model, inputs)

    def inputs(self, model: torch.nn.Module, *, batch: int = 2, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments for `model`; the second sample of a batch is padded where the model takes a mask."""
        return kinds.make(self.kind, model, batch=batch, seed=seed)


# Weights that the general gain leaves with nearly uniform attention.
_GAINS = {"tapas": 2.5, "lxmert": 3.0, "mobilevit": 4.0, "sapiens2": 2.5, "sew": 2.5, "t5gemma2": 2.5}


def _entry(name: str, model_type: str, family: str, kind: str, **rest: Any) -> Entry:
    gain = _GAINS.get(model_type, 1.5)
    return Entry(name=name, model_type=model_type, family=family, kind=kind, gain=gain, **rest)


def _family(family: str, kind: str, rows: str, *, essential: bool = True) -> list[Entry]:
    """Rows: model types, separated by space; `type:kind` where inputs are of another kind."""
    split = [row.partition(":") for row in rows.split()]
    return [_entry(name, name, family, own or kind, essential=essential) for name, _, own in split]


def _variant(name: str, model_type: str, family: str, kind: str = "text", **overrides: Any) -> Entry:
    other = tuple(overrides.pop("reference_overrides", {}).items())
    return _entry(name, model_type, family, kind, overrides=tuple(overrides.items()), reference_overrides=other)


ZOO: list[Entry] = [
    *_family(
        "encoder",
        "text",
        """albert bert canine convbert deberta deberta-v2 distilbert funnel layoutlm:boxes longformer mobilebert
        modernbert mpnet nomic_bert roformer squeezebert tapas xlm xlnet""",
    ),
    *_family(
        "encoder",
        "text",
        """bert-generation big_bird camembert data2vec-text dpr electra ernie esm eurobert flaubert gte ibert
        jina_embeddings_v3 luke markuplm megatron-bert nystromformer rembert roberta-prelayernorm roc_bert splinter
        xlm-roberta-xl xmod""",
        essential=False,
    ),
    *_family(
        "decoder",
        "text",
        """afmoe bloom codegen cohere2 deepseek_v3 diffllama doge exaone4 falcon gemma gemma2 gemma3_text gpt2
        gpt_bigcode gpt_neo gpt_neox gpt_oss gptj llama llama4_text minicpm3 mistral modernbert-decoder mpt
        openai-gpt opt phi3 qwen2 qwen3 qwen3_next stablelm xglm""",
    ),
    *_family(
        "decoder",
        "text",
        """apertus arcee beam biogpt bitnet cohere cpmant ctrl cwm ernie4_5 gemma3n_text gemma4_text glm glm4 glm4_moe
        gpt_neox_japanese granite granitemoe helium hunyuan_v1_dense imagegpt jais2 jetmoe lfm2 longcat_flash mellum
        mimo_v2_flash minimax_m2 ministral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phimoe
        qwen2_moe qwen3_moe seed_oss smollm3 starcoder2 trocr vaultgemma""",
        essential=False,
    ),
    *_family(
        "encoder-decoder",
        "text_to_text",
        "bart bigbird_pegasus fsmt led longt5 pegasus_x prophetnet t5 t5gemma umt5",
    ),
    *_family(
        "encoder-decoder",
        "text_to_text",
        "blenderbot m2m_100 marian mbart mt5 mvp pegasus plbart switch_transformers t5gemma2",
        essential=False,
    ),
    *_family(
        "vision",
        "pixels",
        """beit conditional_detr detr dinov2 dinov3_vit donut-swin dpt layoutlmv3 levit pixtral pvt_v2
        qwen3_vl_vision:patches sam_vision_model segformer siglip_vision_model swin swin2sr swinv2 timesformer:video
        videomae:video vit vitdet vivit:video vjepa2:video""",
    ),
    *_family(
        "vision",
        "pixels",
        """data2vec-vision deformable_detr deit dinov2_with_registers eomt glm4v_vision:patches idefics3_vision ijepa
        internvl_vision maskformer mgp-str mlcd mobilevit pixio pvt radio rf_detr sam3_vit_model sapiens2 slanext
        vit_msn yolos""",
        essential=False,
    ),
    *_family(
        "audio",
        "waveform",
        """audio-spectrogram-transformer:spectrogram moonshine:waveform_to_text parakeet_encoder:time_major sew-d
        speech_to_text:time_major_to_text wav2vec2 wav2vec2-bert:time_major wav2vec2-conformer wavlm
        whisper:mel_major_to_text""",
    ),
    *_family(
        "audio",
        "waveform",
        """data2vec-audio hubert lasr_encoder:time_major qwen2_audio_encoder:mel_major
        seamless_m4t:time_major_to_text sew unispeech unispeech-sat voxtral_encoder:mel_major""",
        essential=False,
    ),
    *_family(
        "multimodal",
        "image_in_text",
        """blip clip flava:text_and_pixels git groupvit idefics2:image_crops_in_text lxmert:visual_features owlvit
        paligemma qwen2_5_vl:patches_in_text siglip vilt:text_and_pixels""",
    ),
    *_family(
        "multimodal",
        "image_in_text",
        """altclip aya_vision bridgetower:text_and_pixels chinese_clip clipseg cohere2_vision got_ocr2
        grounding-dino:text_and_pixels idefics3:image_crops_in_text internvl owlv2 qwen3_vl:patches_in_text
        visual_bert:visual_features xclip:text_and_video""",
        essential=False,
    ),
    *_family("series", "series_channels", "patchtst"),
    # What the defaults do not show.
    _variant("falcon-alibi", "falcon", "decoder", alibi=True, multi_query=True),
    _variant("falcon-grouped", "falcon", "decoder", new_decoder_architecture=True, num_kv_heads=2),
    _variant(
        "gpt2-upcast",
        "gpt2",
        "decoder",
        reorder_and_upcast_attn=True,
        scale_attn_by_inverse_layer_idx=True,
        reference_overrides={"reorder_and_upcast_attn": False},
    ),
    _variant("longformer-128", "longformer", "encoder", "text_long", max_position_embeddings=256),
    _variant("big_bird-sparse", "big_bird", "encoder", "text_long", block_size=4, num_random_blocks=2),
    _variant(
        "llama-odd-head", "llama", "decoder", hidden_size=66, head_dim=22, num_attention_heads=3, num_key_value_heads=1
    ),
    _variant(
        "deberta-v2-buckets",
        "deberta-v2",
        "encoder",
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    _variant("deberta-relative", "deberta", "encoder", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _variant("bert-decoder", "bert", "decoder", is_decoder=True),
]


def by_name(name: str) -> Entry:
    """The entry of that name."""
    for entry in ZOO:
        if entry.name == name:
            return entry
    raise KeyError(f"no entry {name!r} in the zoo; there are {', '.join(e.name for e in ZOO)}")
