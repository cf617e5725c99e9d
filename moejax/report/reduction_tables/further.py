"""Tables of the controls, and of what the paper reports only in text or left open."""

from moejax.report.reduction_tables.columns import table

NATIVE_REPLAY = table(
  "native_replay",
  "The native order given explicitly against the unprobed run; control of everything else.",
  "prompt",
  """
  prompt str id of the prompt
  positions int tokens read, prompt and continuation
  routes int routes compared: positions times layers with routed experts
  routes_equal int of them, same experts in the same slots
  tokens int emitted tokens
  tokens_equal int of them
  text_equal bool whether the decoded texts are equal
  combined_linf float largest difference of a MoE output
  tokens_sha256 str of the comma-joined token ids
  """,
)

MEDIATION = table(
  "mediation",
  "How much of a reduction's effect goes through routing: four runs, mean KL of native tokens.",
  "reduction scheme",
  """
  reduction str persistent (every combine), dynamic (the same, an order per token) or fork (one)
  scheme str of the perturbed combines
  sequences int prompts
  tokens int native tokens scored
  d_qf float KL(native || perturbed, own routes), nats per token
  d_qp float KL(native || perturbed, native routes pinned)
  d_ct float KL(native || native arithmetic, perturbed routes)
  routed_share float? (d_qf - d_qp) / d_qf
  routed_share_low float? of a 95 % cluster bootstrap over sequences
  routed_share_high float? of the same
  transplant_share float? d_ct / d_qf
  flip_rate float expert sets that changed, per token and layer
  nll_difference float mean NLL, perturbed minus native
  nll_low float of a 95 % cluster bootstrap
  nll_high float of the same
  interpretable bool whether d_qf is not zero
  """,
)

CERTIFICATE = table(
  "certificate",
  "Order-invariance proofs on the terms of real tokens, checked against all orders.",
  "scheme layer",
  """
  scheme str operand and accumulator
  layer int of the combine; -1 for all
  combines int term sets: tokens
  elements int of all of them
  certified int elements proved order-invariant
  invariant int elements that no order of the enumeration changed
  false_proofs int proved, but changed by an order
  whole int combines all of whose elements are proved
  orders int tried
  """,
)

CONTRACT_COST = table(
  "contract_cost",
  "Time of each contract against native, side by side in one run.",
  "what scheme",
  """
  what str combine (alone) or decode (a step of the model)
  scheme str native, or operand and accumulator
  rows int tokens
  terms int per token
  hidden int elements per term
  median_ms float of the rounds
  ratio float of medians, against native
  bytes int of the operands and the result
  """,
)

TOPOLOGIES = table(
  "topologies",
  "Other ways to add the terms of the events of the depth prompts.",
  "prompt topology accumulator",
  """
  prompt str id of the prompt
  layer int of the event
  topology str how operands meet
  accumulator str what partial sums are rounded to
  orders int run
  outputs int distinct merged outputs
  linf float? largest distance from the exact sum's output; none where a sum is NaN
  ulps_max int? largest distance in BF16 ulps of the merged output
  ulps_mean float? mean over orders and elements
  certified_share float? elements proved order-invariant; sequential sums only
  like_native bool whether the identity order gives the native output
  """,
)

PROMPTS = table(
  "prompts",
  "Raw: the prompts.",
  "prompt",
  """
  prompt str id
  language str en or zh
  kind str ordinary or candidate
  depth bool one of the three depth prompts
  replay bool one of the thirteen replay prompts
  text text as it is run
  token_ids str joined by commas
  """,
)
