"""Tables of contrasts: four runs, where the damage is, doses, real caches, processes, tasks."""

from moejax.report.route_tables.columns import table

_CONTRASTS = """
clean_nll float mean loss of the clean run, nats per token
*excess_total QF - CC, nats per token
*excess_compute QP - CC, nats per token
*route_forward QF - QP, nats per token; the numerator of RMF
*route_pure CT - CC, nats per token
*interaction route_forward - route_pure, nats per token
interpretable bool whether excess_total is positive and its interval excludes zero
*rmf sum of route_forward over sum of excess_total; none where it is not interpretable
kl_total float mean KL(CC || QF) of the next token, nats
kl_pinned float mean KL(CC || QP), nats
*kl_routed_share share of kl_total that pinning the clean routes removes; none where kl_total is 0
flip_rate float share of tokens whose set of experts changed at the scoring layer
flip_rate_any float share of tokens whose set changed at any layer where a router decides
ties int tokens with an exact tie at the boundary of the scoring layer, QF
control_sequences int sequences that the identity controls ran on
control float largest |difference| of the identity controls, nats; another than 0 is refused
sequences_needed int? sequences for the interval of excess_total to exclude zero with power 0.8
route_sequences_needed int? the same for route_forward
"""

FOUR_RUN = table(
  "four_run",
  "The four runs of every disturbance: how much of the damage goes through routing.",
  "disturbance",
  _CONTRASTS + "paper text RMF of the paper for its model of this family, or nothing",
)
WEIGHT_BOUND = table(
  "weight_bound",
  "Round-to-nearest experts of few bits: a bound of another domain.",
  "disturbance",
  "bits int of a weight\ngroup int? inputs that share a scale; none is a whole row"
  + _CONTRASTS
  + "paper text RMF of the paper",
)
REAL_KERNEL = table(
  "real_kernel",
  "A packed cache of few bits, dequantised on read, beside what the simulated curve predicts.",
  "bits window",
  """
bits int of a stored code
group int channels that share scale and zero point
window int newest tokens that stay exact, until a flush
cache_bytes int bytes that the packed state of one sequence holds
plain_bytes int bytes of the BF16 state
dose float? excess_total over that of the simulated quantiser of 4 bits
predicted_low float? lower end of RMF that the dose curve gives at that dose
predicted_high float? upper end
in_band bool? whether RMF lies within
"""
  + _CONTRASTS.strip()
  + "\npaper text RMF of the paper's int4, int3, int2",
)
DOSE_SWEEP = table(
  "dose_sweep",
  "RMF against dose: the direct and the routed channel.",
  "bits strength",
  """
bits int of the simulated quantiser
strength float of it
dose float? excess_total over that of 4 bits at strength 1
matched bool? whether the dose is 1 within 20 %
"""
  + _CONTRASTS.strip(),
)
DOSE_SUMMARY = table(
  "dose_summary",
  "Where the dose curve crosses and peaks.",
  "disturbance",
  """
peak_dose float? dose with the largest RMF
peak_rmf float? it
crossover_dose float? first dose where the direct channel grew by the larger factor
direct_factor float? of the direct channel at that step
routed_factor float? of the routed one
*decline RMF at the peak minus RMF at the largest dose, paired
paper text peak share and decline of the paper
""",
)
ATTRIBUTION = table(
  "attribution",
  "Harm by what changed: the scoring layer's set, an upstream one, or nothing.",
  "mask",
  """
mask str jump, nonlocal or pure_flux
masked_tokens int tokens of the mask
harm float sum of QF - QP, nats
share float? share of the signed sum
paper text share in the paper
""",
)
TAX = table(
  "tax",
  "Harmful and beneficial flips, and how far they cancel.",
  "scope",
  """
scope str set changed at the scoring layer, or at any
flips int tokens whose set changed
harmful float summed harm of those with harm > 0, nats
beneficial float summed benefit of the others, nats
net float their difference, nats
harmful_mean float? mean harm, nats
beneficial_mean float? mean benefit, nats
cancellation float? smaller sum over larger
paper text cancellation in the paper
""",
)
LAYERS = table(
  "layers",
  "Mediation by depth: one layer pinned, all but one, one transplanted, all but one.",
  "layer",
  """
layer int of the route
*pin_only QF - (QF with only this layer pinned), nats per token
*pin_others QF - (QF with all layers but this one pinned), nats per token
*transplant_only (CC with only this layer's disturbed route) - CC, nats per token
*transplant_others (CC with all disturbed routes but this layer's) - CC, nats per token
*interaction pin_only - transplant_only, nats per token
flip_rate float share of tokens whose set changed here
""",
)
REPLICATION = table(
  "process_replication",
  "The core contrasts in fresh processes, and with a drawn reduction order in each.",
  "arm quantity",
  """
arm str engine (nothing drawn) or orders (one drawn contract and order per process)
quantity str rmf or route_forward, nats per token
processes int fresh processes
mean float over processes
between_sd float between processes
low float smallest
high float largest
within_sd float within a process
repeat_gap float largest difference between repeats within a process, nats; 0 is bitwise
icc float? share of variance that is between processes; none where there is no variance
paper text mean and deviation of the paper
""",
)
REPLICATION_RUNS = table(
  "process_runs",
  "Every process of the replication.",
  "arm process repeat",
  """
arm str engine or orders
process int number
repeat int within the process
scheme str drawn contract, or native
order_seed int? of the drawn orders
pid int of the operating system
excess_total float nats per token
route_forward float nats per token
rmf float? route_forward over excess_total
nll_sha256 str of the losses of the four runs
""",
)
TASK_LEVEL = table(
  "task_level",
  "Four-choice questions: losses, accuracy, and whether flips cancel.",
  "disturbance",
  """
questions int asked
choices int all of them; the scored tokens are theirs
accuracy_clean float share right: the choice with the smallest loss per token
accuracy_disturbed float the same under the disturbance
*accuracy_drop clean - disturbed, questions are clusters
*excess_total nats per token of the choices
*route_forward nats per token
rmf float? route_forward over excess_total; none where excess_total does not exclude zero
interpretable bool whether it does
harmful float summed harm over flipped tokens, nats
beneficial float summed benefit, nats
cancellation float? smaller over larger
paper text cancellation in the paper
""",
)
EXCHANGE_RATE = table(
  "exchange_rate",
  "What a byte buys: clean routes of the prefix, or its cache at 8 bits.",
  "arm",
  """
arm str routes or precision
bytes float per token and layer
*recovery share of the routed ceiling, sum of QF - arm over sum of QF - QP
recovery_per_byte float? recovery over bytes
bar float? half of what precision recovers, if that excludes zero; on the row of routes
ratio float? recovery per byte over that of precision
paper text recovery in the paper
""",
)
HELD_OUT = table(
  "held_out",
  "The held-out split, read once.",
  "disturbance",
  _CONTRASTS
  + """tax_net float net signed-flip tax, nats per token
tax_harmful float its harmful component, nats per token
tax_beneficial float its beneficial component, nats per token
*oracle oracle-gated recovery, nats per token
oracle_bound float its bound, 0.008 nats scaled by the dose
reading int number of this read of the split
forced_reads int reads so far that had to be forced
protocol_sha256 str of the protocol, recorded before the read""",
)
