"""Tables of signals and remedies: detection, probes, policies, references, gains, verdicts."""

from moejax.report.route_tables.columns import table

DETECTION = table(
  "detection",
  "What the margin of the disturbed run tells: areas under the curve, each over its population.",
  "question",
  """
question str flip, harm (given a flip) or benefit, which has two groups of negatives
population str the tokens compared
*auc of minus the margin
positives int tokens that are meant
negatives int the others
weight float? share of the negatives of benefit
reconstruction float? weighted sum of the two parts, on the row of benefit
residual float? its distance from auc
positive_rate float share of positives
paper text auc in the paper
""",
)
PROBES = table(
  "probes",
  "Predicting harm given a flip from what is seen at inference, out of fold by sequence.",
  "probe",
  """
probe str features and model
features int of a token
flips int tokens, all flipped at the scoring layer
harmful_rate float share with harm > 0
*auc out of fold
within_band bool whether |auc - 0.5| <= 0.05 and the interval covers 0.5, declared before the run
paper text auc in the paper
""",
)
POLICIES = table(
  "policies",
  "Clean routes imposed on chosen tokens, run and not summed.",
  "policy",
  """
policy str oracle, random, margin, or a given predictor
pinned_tokens int tokens pinned
*recovery share of the routed part, sum of QF - policy over sum of QF - QP
*recovered nats per token
*minus_random recovery minus that of random, paired
paper text minus_random in the paper
""",
)
SMOOTHING = table(
  "smoothing",
  "The gate softened at its boundary: what it does to harmful and to beneficial flips.",
  "scope",
  """
scope str harmful flips, beneficial flips, or all tokens
scope_tokens int of it
tau float width of the boundary, in units of the margin
*delta QF - softened, nats per token
paper text delta in the paper
""",
)
REFERENCE_FIDELITY = table(
  "reference_fidelity",
  "Which clean routes are known: all, those of the prefix, or those of decoding.",
  "reference",
  """
reference str full, prefix or decode
*of_routed recovery over the routed ceiling, sum of QF - QP
*of_total recovery over the total damage, sum of QF - CC
paper text of_routed in the paper
""",
)
FLAG_SWAP = table(
  "flag_swap",
  "The same checkpoint with norm_topk_prob as it is and as it is not.",
  "norm_topk_prob",
  """
norm_topk_prob bool of the run
native bool whether it is the checkpoint's own
control float largest |difference| of the identity controls, nats
clean_nll float nats per token
*excess_total nats per token
*routed_ceiling QF - QP, nats per token
*full_recovery full pin over the total damage
*prefix_recovery prefix pin over the total damage
damage_ratio float? routed ceiling without normalisation over that with it
paper text full recovery in the paper
""",
)
GAIN = table(
  "disturbance_gain",
  "How a difference of states grows from block to block.",
  "layer",
  """
layer int whose block is passed
gain float median over tokens of the ratio of differences after and before
relative_gain float the same, differences relative to the state
small_gain_share float share of tokens whose difference shrank
excluded int tokens without a difference before
cross_share float share of the growth of the squared difference that alignment brings
persistence float correlation of log differences of neighbouring tokens after the block
""",
)
GAIN_SUMMARY = table(
  "disturbance_gain_summary",
  "Products of the gains and what goes with them.",
  "disturbance",
  """
gain_product float raw
relative_product float of relative gains
first_relative_gain float of the first step
accumulated_cross_share float over all layers
mean_persistence float lag one, over layers
soundness float largest relative distance of the product of step ratios from the end-to-end ratio
shared_share float? norm of the always-on expert's output over the sum of its and the routed norm
paper text raw and relative product of the paper
""",
)
DATA_MANIFEST = table(
  "data_manifest",
  "The text of the split: sources by terciles of length.",
  "source tercile",
  """
source str of the documents
tercile int of length in tokens, 0 is short
documents int in it
bucket_sequences int windows that were drawn from it
""",
)
VERDICTS = table(
  "predictions",
  "What was predicted before the run, and what came of it.",
  "id",
  """
id str of the prediction
sha256 str of its registration
status str MET, MISSED or NOT INTERPRETABLE
claim text what was claimed
mechanism text why
expected text the threshold
measured text what was found
paper text what the paper found
""",
)
EVIDENCE = table(
  "evidence",
  "Every claim, its grade and its numbers.",
  "claim",
  """
claim str id
grade str empirical, pilot or bound
statement text what is claimed
table str where the numbers are
value float? measured
low float? end of its interval
high float? the other
interpretable bool whether it is
""",
)
LEDGER = table(
  "negative_results",
  "Misses, what is not interpretable, and intervals that include zero.",
  "source id",
  """
source str predictions or evidence
id str of it
status str what went wrong
statement text what was claimed
measured text what was found
expected text what was hoped for
""",
)
