"""Sizes of tiny models by the name of a configuration's attribute, and what single model types need besides."""

from __future__ import annotations

from typing import Any

import torch

_BY_SIZE = {
    32: (
        "hidden_size d_model n_embd dim embed_dim emb_dim dim_model word_embed_proj_dim pooler_hidden_size "
        "output_hidden_size out_hidden_size encoder_hidden_size decoder_hidden_size embedding_size projection_dim "
        "pooler_output_size hidden_sizes neck_hidden_sizes projection_size prediction_head_size fusion_hidden_size "
        "vision_output_dim embedding_dim"
    ),
    48: (
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim moe_intermediate_size "
        "shared_expert_intermediate_size ffn_hidden_size n_inner d_inner dim_ff dff intermediate_size_mlp "
        "shared_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
        "decoder_intermediate_size expert_ffn_size dense_intermediate_size"
    ),
    4: (
        "num_attention_heads n_head encoder_attention_heads decoder_attention_heads n_heads attention_heads "
        "decoder_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts n_experts "
        "linear_num_value_heads linear_num_heads index_n_heads num_queries mamba_n_heads mamba_num_heads"
    ),
    3: (
        "num_hidden_layers n_layer encoder_layers decoder_layers num_layers num_decoder_layers n_layers "
        "num_encoder_layers num_encoder_blocks_ decoder_num_hidden_layers depth num_hidden_layers_"
    ),
    2: (
        "num_key_value_heads num_experts_per_tok moe_topk moe_top_k num_experts_per_token top_k_experts "
        "linear_num_key_heads n_group_ num_shared_experts n_shared_experts moe_k num_selected_experts"
    ),
    1: "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers num_nextn_predict_layers_",
    8: (
        "head_dim qk_rope_head_dim v_head_dim qk_nope_head_dim d_kv d_head index_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim mamba_head_dim_ global_head_dim swa_head_dim query_pre_attn_scalar "
        "state_size mamba_d_state ssm_state_size index_topk sliding_window q_lora_rank_ laurel_rank dim_head "
        "time_step_rank mamba_dt_rank chunk_size mamba_chunk_size patch_size_"
    ),
    16: "kv_lora_rank q_lora_rank qk_head_dim num_mel_bins o_lora_rank image_size_ classifier_proj_size",
    60: "vocab_size vocab_size_per_layer_input t2u_vocab_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions",
}

SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()} | {
    "image_size": 32,
    "patch_size": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "mask_token_id": 4,
    "decoder_start_token_id": 1,
    "type_vocab_size": 2,
    "depths": 2,
    "num_frames": 4,
    "conv_dim": 8,
    "forced_eos_token_id": 2,
    "forced_bos_token_id": 1,
}

_LATENT = dict(num_key_value_heads=4)
_SWIN = dict(depths=[1, 1, 1], num_heads=[2, 2, 4], embed_dim=16, window_size=2, image_size=32, patch_size=4)
_INDEXED = dict(
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=8,
    indexer_budget=8,
    indexer_compress_ratio=2,
    ngram_vocab_size_base=50,
    hc_lowrank=8,
)

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "axk1",
            "axk2",
            "bailing_hybrid",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "kimi_linear",
            "longcat_flash",
            "minicpm3",
            "youtu",
            "esmc",
        ],
        _LATENT,
    ),
    "bamba": dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8),
    "granitemoehybrid": dict(layer_types=["mamba", "attention", "mamba"], mamba_n_heads=8, mamba_d_head=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=1),
    "nemotron_h": dict(mamba_num_heads=8, mamba_head_dim=8, n_groups=2),
    "codegen": dict(rotary_dim=4),
    "gptj": dict(rotary_dim=4),
    "falcon_h1": dict(mamba_d_ssm=32, mamba_d_head=8),
    "longcat_flash": _LATENT | dict(num_layers=2, zero_expert_num=2),
    "zaya": dict(num_experts_per_tok=1),
    "nemotron": dict(head_dim=8, num_key_value_heads=2),
    "ministral": dict(head_dim=8),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8),
    "deepseek_v2": _LATENT | dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"], full_attn_idxs=[1]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"]),
    "gemma3n_text": dict(
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 3,
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0, 0.0, 0.0],
    ),
    "xlstm": dict(num_heads=4, qk_dim_factor=0.5, v_dim_factor=1.0),
    "xmod": dict(default_language="en_XX", languages=["en_XX"]),
    "causal/reformer": dict(is_decoder=True),
    "reformer": dict(
        axial_pos_embds=False,
        attn_layers=["local", "local", "local"],
        local_attn_chunk_length=8,
        attention_head_size=8,
        feed_forward_size=48,
    ),
    "esm": dict(vocab_size=60, mask_token_id=4, pad_token_id=0),
    "mra": dict(approx_mode="full", block_per_row=1),
    "luke": dict(entity_vocab_size=10, entity_emb_size=8),
    "perceiver": dict(
        num_latents=6,
        d_latents=16,
        d_model=16,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        max_position_embeddings=32,
        vocab_size=60,
    ),
    "fsmt": dict(src_vocab_size=60, tgt_vocab_size=60),
    "led": dict(attention_window=[4, 4, 4], max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    "longformer": dict(attention_window=[4, 4, 4]),
    "roc_bert": dict(pronunciation_vocab_size=20, shape_vocab_size=20),
    "zamba": dict(
        num_hidden_layers=6,
        attn_layer_period=3,
        attn_layer_offset=2,
        mamba_expand=2,
        n_mamba_heads=2,
        attention_hidden_size=64,
        attention_head_dim=16,
    ),
    "neomme": dict(head_dim=16, num_attention_heads=2),
    "musicgen": dict(decoder=dict(num_codebooks=1)),
    "musicgen_melody": dict(decoder=dict(num_codebooks=1)),
    "hrm_text": dict(num_hidden_layers=2, L_cycles=1),
    "qwen4_exp_text": _INDEXED,
    "qwen4_exp": dict(text_config=_INDEXED),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    ),
    "hgnet_v2": dict(hidden_sizes=[256, 512, 1024, 2048]),
    "blt": dict(encoder_hash_byte_group_vocab=20),
    # Vision
    "whisper": dict(max_source_positions=16),
    "wav2vec2-bert": dict(feature_projection_input_dim=32),
    "sew": dict(squeeze_factor=1),
    "sew-d": dict(squeeze_factor=1),
    "granite_speech5_ctc": dict(encoder_config=dict(context_size=16)),
    "lasr_ctc": dict(encoder_config=dict(num_mel_bins=32)),
    "parakeet_ctc": dict(encoder_config=dict(num_mel_bins=32)),
    "audio-spectrogram-transformer": dict(max_length=64, num_mel_bins=16, patch_size=8),
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "swin2sr": dict(depths=[1, 1], num_heads=[2, 2], embed_dim=16, window_size=4, image_size=16, patch_size=1),
    "convnext": dict(hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], patch_size=2),
    "convnextv2": dict(hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], patch_size=2),
    "dinov3_convnext": dict(hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]),
    "bit": dict(embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_groups=4),
    "resnet": dict(embedding_size=8, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]),
    "regnet": dict(embedding_size=8, hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 1, 1], groups_width=4),
    "cvt": dict(embed_dim=[8, 16, 24], num_heads=[1, 2, 3], depth=[1, 2, 3], patch_sizes=[7, 3, 3]),
    "focalnet": dict(embed_dim=8, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], patch_size=4),
    "glpn": dict(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=8
    ),
    "segformer": dict(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=8
    ),
    "pvt": dict(
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        image_size=32,
        patch_sizes=[4, 2, 2, 2],
    ),
    "pvt_v2": dict(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2]),
    "poolformer": dict(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    "swiftformer": dict(embed_dims=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    "hiera": dict(
        embed_dim=8,
        image_size=[32, 32],
        patch_stride=[4, 4],
        patch_size=[7, 7],
        patch_padding=[3, 3],
        depths=[1, 1, 1],
        num_heads=[1, 1, 1],
        num_query_pool=2,
        embed_dim_multiplier=2.0,
        query_stride=[2, 2],
        masked_unit_size=[4, 4],
        masked_unit_attention=[True, True, False],
    ),
    "dinat": dict(embed_dim=8, depths=[1, 1], num_heads=[2, 2], kernel_size=3, dilations=[[1], [1]]),
    "levit": dict(
        image_size=64,
        patch_size=16,
        hidden_sizes=[8, 16, 16],
        num_attention_heads=[1, 2, 2],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
        attention_ratio=[2, 2, 2],
        mlp_ratio=[2, 2, 2],
        down_ops=[["Subsample", 4, 2, 4, 2, 2], ["Subsample", 4, 4, 4, 2, 2]],
    ),
    "efficientnet": dict(
        image_size=32,
        hidden_dim=1280,
        in_channels=[32, 16],
        out_channels=[16, 24],
        kernel_sizes=[3, 3],
        strides=[1, 2],
        num_block_repeats=[1, 1],
        expand_ratios=[1, 2],
        depthwise_padding=[],
        width_coefficient=1.0,
        depth_coefficient=1.0,
    ),
    "mobilevit": dict(
        hidden_sizes=[8, 12, 16], neck_hidden_sizes=[4, 8, 8, 8, 8, 8, 16], patch_size=2, num_attention_heads=2
    ),
    "mobilevitv2": dict(patch_size=2, width_multiplier=0.25, image_size=64),
    "mobilenet_v1": dict(depth_multiplier=0.25, image_size=32),
    "mobilenet_v2": dict(depth_multiplier=0.25, image_size=32),
    "textnet": dict(stem_num_channels=3, stem_out_channels=8, hidden_sizes=[8, 8, 8, 8, 8]),
    "vjepa2": dict(
        crop_size=16,
        frames_per_clip=2,
        tubelet_size=1,
        patch_size=8,
        pred_hidden_size=16,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=2,
        num_hidden_layers=2,
    ),
    "vivit": dict(tubelet_size=[2, 8, 8]),
    "videoprism_vision_model": dict(tubelet_size=[1, 8, 8], num_spatial_layers=2, num_temporal_layers=2),
    "imagegpt": dict(n_positions=64),
}
"""Attributes of single model types, or of a ``task/model_type``."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "vit_mae": {"noise": lambda generator, dtype: torch.rand(1, 16, generator=generator, dtype=dtype)},
    "siglip2": {
        "pixel_values": lambda generator, dtype: torch.randn(1, 16, 192, generator=generator, dtype=dtype),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]]),
    },
    "vision/imagegpt": {
        "pixel_values": None,
        "input_ids": lambda generator, dtype: torch.randint(0, 50, (1, 9), generator=generator),
    },
    "audio-spectrogram-transformer": {
        "input_values": lambda generator, dtype: torch.randn(1, 64, 16, generator=generator, dtype=dtype)
    },
    "vjepa2": {
        "pixel_values": None,
        "pixel_values_videos": lambda generator, dtype: torch.randn(1, 2, 3, 16, 16, generator=generator, dtype=dtype),
    },
}
"""Further arguments of the forward pass: a value, or a function of the generator and the type of numbers."""

SINGLE_PRECISION = frozenset(["xglm", "mra", "fsmt"])
"""Types whose own code cannot run in float64."""
