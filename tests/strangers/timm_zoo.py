"""Architectures of timm, small, by family."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from strangers import torchvision_stub
from strangers.by_value import judge_by_value
from strangers.cases import Verdict
from strangers.models import randomised

FAMILIES: dict[str, tuple[str, ...]] = {
    "vit": (
        "test_vit",
        "test_vit2",
        "test_vit3",
        "test_vit4",
        "vit_tiny_patch16_224",
        "vit_small_patch32_224",
        "vit_pwee_patch16_reg1_gap_256",
        "vit_wee_patch16_reg1_gap_256",
    ),
    "vit, other blocks": (
        "vit_betwixt_patch16_rope_reg4_gap_256",
        "vit_xsmall_patch16_clip_224",
        "vit_base_patch32_clip_quickgelu_224",
        "vit_small_r26_s32_224",
        "vit_dpwee_patch16_reg1_gap_256",
    ),
    "deit": ("deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"),
    "siglip": ("vit_base_patch16_siglip_224", "naflexvit_base_patch16_gap"),
    "beit": ("beit_base_patch16_224", "beitv2_base_patch16_224"),
    "eva": ("eva02_tiny_patch14_224", "vit_small_patch16_rope_224", "vit_small_patch16_dinov3"),
    "cait": ("cait_xxs24_224", "cait_xxs36_224"),
    "xcit": ("xcit_nano_12_p16_224", "xcit_tiny_12_p16_224"),
    "swin": ("swin_tiny_patch4_window7_224", "swin_s3_tiny_224"),
    "swinv2": ("swinv2_tiny_window8_256", "swinv2_cr_tiny_ns_224"),
    "hiera": ("hiera_tiny_224",),
    "mvitv2": ("mvitv2_tiny",),
    "pvt": ("pvt_v2_b0", "pvt_v2_b1"),
    "pit": ("pit_ti_224", "pit_xs_distilled_224"),
    "crossvit": ("crossvit_tiny_240", "crossvit_9_240"),
    "levit": ("levit_128s", "levit_conv_128s"),
    "convit": ("convit_tiny",),
    "coat": ("coat_tiny",),
    "tnt": ("tnt_s_legacy_patch16_224",),
    "twins": ("twins_pcpvt_small", "twins_svt_small"),
    "gcvit": ("gcvit_xxtiny", "gcvit_xtiny"),
    "davit": ("davit_tiny",),
    "maxvit": ("maxvit_rmlp_pico_rw_256", "coatnet_nano_rw_224", "coatnext_nano_rw_224"),
    "nest": ("nest_tiny", "jx_nest_tiny"),
    "visformer": ("visformer_tiny",),
    "volo": ("volo_d1_224",),
    "mixers": ("mixer_s32_224", "resmlp_12_224", "gmixer_12_224", "gmlp_ti16_224"),
    "metaformer": ("poolformer_s12", "poolformerv2_s12", "convformer_s18", "caformer_s18"),
    "convnext": ("convnext_atto", "convnext_femto", "convnextv2_atto", "test_convnext"),
    "edgenext": ("edgenext_xx_small", "edgenext_x_small"),
    "fastvit": ("fastvit_t8",),
    "mobilevit": ("mobilevit_xxs", "mobilevit_xs", "mobilevitv2_050"),
    "efficientformer": ("efficientformer_l1", "efficientformer_l3", "efficientformerv2_s0"),
    "efficientvit": ("efficientvit_b0", "efficientvit_m0"),
    "repvit, tiny_vit": ("repvit_m0_9", "tiny_vit_5m_224", "tiny_vit_11m_224"),
    "focalnet": ("focalnet_tiny_srf",),
    "starnet, mambaout": ("starnet_s1", "mambaout_femto"),
    "resnet": ("resnet10t", "test_resnet"),
    "vit, other sizes": (
        "vit_base_patch14_dinov2",
        "vit_dlittle_patch16_reg1_gap_256",
        "vit_intern300m_patch14_448",
        "vit_base_patch16_siglip_gap_224",
        "vit_tiny_r_s16_p8_224",
        "vit_base_mci_224",
        "aimv2_large_patch14_224",
        "beit3_base_patch16_224",
        "beitv2_large_patch16_224",
        "deit3_medium_patch16_224",
        "deit_small_distilled_patch16_224",
        "cait_xs24_384",
    ),
    "vit, relative positions": ("vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224"),
    "eva, other": (
        "eva02_base_patch16_clip_224",
        "vit_pe_core_tiny_patch16_384",
        "vit_pe_spatial_tiny_patch16_512",
        "vit_base_patch16_lingbot",
    ),
    "naflexvit": ("naflexvit_base_patch16_map", "naflexvit_base_patch16_par_gap", "naflexvit_base_patch16_siglip"),
    "towers of language models": ("qwen3_vit_88m", "qwen3_vit_88m_merge", "gemma4_vit_167m"),
    "sam": ("samvit_base_patch16_224", "sam2_hiera_tiny", "hieradet_small", "hiera_small_abswin_256"),
    "vitamin, nextvit": ("vitamin_small_224", "nextvit_small"),
    "shvit, swiftformer": ("shvit_s1", "swiftformer_xs"),
    "coat, tnt, crossvit, other": (
        "coat_lite_tiny",
        "tnt_s_patch16_224",
        "crossvit_9_dagger_240",
        "convit_small",
        "pit_xs_224",
        "xcit_nano_12_p8_224",
    ),
    "stages, other": (
        "swin_s3_small_224",
        "swinv2_cr_tiny_224",
        "swinv2_tiny_window16_256",
        "twins_svt_base",
        "mvitv2_base_cls",
        "pvt_v2_b2_li",
        "davit_small",
        "gcvit_tiny",
        "nest_tiny_jx",
        "focalnet_tiny_lrf",
        "visformer_small",
        "volo_d2_224",
        "levit_256d",
        "levit_conv_192",
    ),
    "maxvit, other": (
        "maxvit_tiny_tf_224",
        "maxvit_tiny_pm_256",
        "maxxvit_rmlp_nano_rw_256",
        "maxxvitv2_nano_rw_256",
        "coatnet_rmlp_nano_rw_224",
    ),
    "lowformer, iformer, cpubone, csatv2": ("lowformer_b0", "iformer_t", "cpubone_nano", "csatv2"),
    "mobile": (
        "mobilenetv4_conv_small",
        "mobilenetv4_hybrid_medium_075",
        "mobilevitv2_075",
        "edgenext_small_rw",
        "fastvit_sa12",
        "fastvit_mci0",
        "repvit_m1",
        "efficientvit_l1",
        "efficientvit_m2",
    ),
    "mixers, other": (
        "mixer_b16_224",
        "gmlp_s16_224",
        "resmlp_24_224",
        "poolformer_s24",
        "poolformerv2_s24",
        "convformer_s36",
        "caformer_s36",
        "convmixer_768_32",
        "inception_next_atto",
        "rdnet_tiny",
        "fasternet_t0",
        "convnext_zepto_rms_ols",
        "convnextv2_femto",
        "test_convnext3",
        "test_mambaout",
        "starnet_s050",
    ),
    "recurrences, scans": ("sequencer2d_s", "sequencer2d_m", "efficientvim_m1"),
    "convolutions": (
        "ghostnetv2_100",
        "densenet121",
        "botnet26t_256",
        "hgnetv2_b0",
        "regnetz_005",
        "res2net50_14w_8s",
        "resnetv2_18",
        "skresnet18",
        "test_byobnet",
        "test_efficientnet",
        "test_nfnet",
    ),
    "convolutions, other": (
        "eca_botnext26ts_256",
        "eca_nfnet_l0",
        "lambda_resnet50ts",
        "rexnetr_100",
        "xception41",
        "dla46x_c",
        "dpn68",
        "hardcorenas_c",
        "repghostnet_058",
        "selecsls42",
        "ghostnet_050",
        "lcnetv2_small",
        "mobilenetv3_small_100",
        "cs3darknet_s",
        "resnest26d",
    ),
    "blocks, other": (
        "naflexvit_base_patch16_parfac_gap",
        "qwen3_vit_88m_enc",
        "iformer_s",
        "hiera_small_224",
        "mambaout_small",
        "lowformer_b1",
        "swiftformer_s",
        "maxvit_rmlp_tiny_rw_256",
        "pit_s_224",
        "vit_base_patch16_rpn_224",
        "vit_relpos_medium_patch16_cls_224",
        "vit_small_resnet26d_224",
    ),
}


SMALLER: tuple[dict[str, Any], ...] = (
    {"depth": 3, "embed_dim": 48, "num_heads": 4},
    {"depths": (1, 1, 2, 1), "embed_dim": 16, "num_heads": (1, 2, 4, 8)},
    {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
    {"depth": 3},
    {"depths": (1, 1, 2, 1)},
    {},
)
"""Fewer and narrower blocks, by what families call them; the first that an architecture takes."""


LARGER = ("levit", "shvit", "csatv2", "efficientvim", "efficientvit_m")
"""Families that a small picture would leave with one token: nothing could be told of what comes before pooling."""


def names() -> list[str]:
    return [name for family in FAMILIES.values() for name in family]


def build(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model with random weights, and a random picture, as small as the architecture lets it be."""
    torchvision_stub.install()
    import timm

    is_larger = name.startswith(LARGER)
    sizes = ({"img_size": 128}, {}) if is_larger else ({"img_size": 64}, {"img_size": 128}, {})
    for size, shrunk in product(sizes, SMALLER):
        try:
            model = timm.create_model(name, pretrained=False, num_classes=11, **size, **shrunk)
        except (TypeError, ValueError, AssertionError, RuntimeError, IndexError, AttributeError):
            continue
        fixed = model.default_cfg.get("fixed_input_size", False)
        side = size.get("img_size") or (model.default_cfg["input_size"][-1] if fixed or is_larger else 64)
        picture = torch.randn(1, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        model = randomised(model)
        try:
            with torch.no_grad():
                model(picture)
        except (AssertionError, RuntimeError, ValueError):
            continue
        return model, picture
    raise LookupError(f"timm cannot build {name} at random")


def judge_timm(name: str) -> Verdict:
    model, picture = build(name)
    return judge_by_value(model, lambda m: m(picture), {"x": picture})
