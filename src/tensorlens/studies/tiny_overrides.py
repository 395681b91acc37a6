"""Sizes of tiny models by the name of a configuration's attribute, and what single model types need besides."""

from __future__ import annotations

from typing import Any

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
    "image_size": 32, "patch_size": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 2,
    "cls_token_id": 1, "mask_token_id": 4, "decoder_start_token_id": 1, "type_vocab_size": 2, "depths": 2,
    "num_frames": 4, "forced_eos_token_id": 2, "forced_bos_token_id": 1,
}  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {}
"""Attributes of single model types, or of a ``task/model_type``."""

ARGUMENTS: dict[str, dict[str, Any]] = {}
"""Further arguments of the forward pass: a value, or a function of the generator and the type of numbers."""
