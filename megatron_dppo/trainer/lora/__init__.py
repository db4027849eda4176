"""LoRA on Megatron's modules: adapters beside the frozen linears, their gradients, merged weights and files."""
