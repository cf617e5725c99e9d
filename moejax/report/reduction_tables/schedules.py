"""Tables of schedules: every combine of a request in an order of its own."""

from moejax.report.reduction_tables.columns import table

PERSISTENT = table(
  "persistent_ablation",
  "Layer-static schedules at every token: trajectories that leave native and their own identity.",
  "prompt scheme",
  """
  prompt str id of the prompt, or all
  scheme str of every combine
  schedules int request seeds
  native_routes int whose routes differ from native anywhere
  native_tokens int whose token ids differ from native
  canonical_routes int whose routes differ from the identity order of the scheme
  canonical_tokens int whose token ids do
  unique_continuations int distinct token sequences; summed over prompts for all
  paper_native_routes str in the paper, of another model
  paper_native_tokens str in the paper, of another model
  """,
)

TRAJECTORIES = table(
  "persistent_trajectories",
  "Raw: every trajectory of the persistent and canonical protocols.",
  "prompt scheme kind request",
  """
  prompt str id of the prompt
  scheme str of every combine; native for the baselines
  kind str native, identity or schedule
  request int seed of the schedule; -1 without one
  tokens str emitted ids, joined by commas
  tokens_sha256 str of the same
  routes_sha256 str of the expert sets of every position and layer, as int32
  routes_like_native bool the same sets everywhere
  first_bit str? position:layer of the first MoE output with another bit than native
  first_route str? position:layer of the first other set
  combines int combines of the trajectory
  certified int of them, order-invariant in every element (native run)
  """,
)

CANONICAL = table(
  "canonical_reference",
  "Identity order in each scheme against native.",
  "prompt scheme",
  """
  prompt str id of the prompt
  scheme str of every combine
  routes_differ bool anywhere
  tokens_differ bool anywhere
  tokens_sha256 str of the emitted ids
  text text the continuation
  paper_tokens_differ str of three prompts in the paper, of another model
  """,
)

C_INTERMEDIATE = table(
  "c_intermediate_summary",
  "Schedules under C: states at the last prompt position against native.",
  "prompt",
  """
  prompt str id of the prompt
  schedules int request seeds
  records int captured
  missing int not captured
  moe_linf float MoE output, every routed layer
  post_mhc_linf float state after the block
  router_linf float router logits
  lm_linf float LM logits
  equal int schedules in which every value is equal bit for bit
  certified bool whether every combine that the prompt used is order-invariant under C
  """,
)

PROPAGATION = table(
  "propagation_trace",
  "One persistent B schedule, stage by stage.",
  "stage",
  """
  prompt str id of the prompt
  scheme str of every combine
  request int seed of the schedule
  stage str what is compared
  layer int? of the stage
  equal bool bit for bit
  linf float? largest difference
  native str? what native has
  branch str? what the schedule has
  paper str the paper's difference, of another model
  """,
)
