"""Tables of single forks: one combine of one token in other orders, and what becomes of it."""

from moejax.report.reduction_tables.columns import table

BASIN_COUNTS = table(
  "basin_counts",
  "What all orders of one combine lead to: distinct outputs, states and continuations.",
  "prompt scheme horizon",
  """
  prompt str id of the prompt
  layer int of the fork
  position int of the event, zero-based
  fork_token int id of the token that the event reads
  scheme str of the forked combine
  sampled bool whether the orders are a sample
  orders int orders that the branches stand for
  classes int structural classes, one branch each
  outputs int distinct MoE outputs
  states int distinct post-mHC states
  states_unlike_native int branches whose post-mHC state differs from the native one
  complete_states int distinct pairs of persistent state and next token after the event
  output_linf float largest distance of a MoE output from the native one
  state_linf float largest distance of a post-mHC state from the native one
  horizon int emitted tokens, the event's included
  texts int distinct continuations (basins)
  native_basin_orders int orders in the basin of the native continuation
  paper_texts str texts at eight tokens in the paper, of another model; else nothing
  """,
)

BASIN_RANK_FREQUENCY = table(
  "basin_rank_frequency",
  "Basins by falling volume.",
  "prompt scheme horizon rank",
  """
  prompt str id of the prompt
  scheme str of the forked combine
  horizon int emitted tokens
  rank int from 1
  order_count int orders in the basin
  orders int of all
  class_count int classes in the basin
  classes int of all
  native bool whether the native continuation is in it
  tokens_sha256 str of the comma-joined token ids
  text text the continuation
  """,
)

BRANCHES = table(
  "branches",
  "Raw: every branch of the sweeps.",
  "prompt scheme branch",
  """
  prompt str id of the prompt
  scheme str of the forked combine
  branch int number of the class
  order str its lowest order, of terms by ascending expert id
  weight int orders it stands for
  output int which distinct MoE output
  output_linf float distance from the native MoE output
  exact_ulps_max int largest distance from the exact sum's output, BF16 ulps
  exact_ulps_mean float mean over elements of the same
  state_sha256 str of the post-mHC state
  state_linf float distance from the native post-mHC state
  complete_state int which distinct complete state after the event
  tokens str emitted token ids, joined by commas
  """,
)

MHC_SUMMARY = table(
  "mhc_equivalence_summary",
  "Post-mHC substitution: native + (H_B - H_P) at one layer and position against branch B.",
  "prompt scheme",
  """
  prompt str id of the prompt
  scheme str of the branch
  layer int of the fork
  position int of the event
  branch int class that was substituted
  refused int classes taken up before it whose state could not be rebuilt
  vacuous bool whether its continuation is the native one: the control shows nothing
  values int in the state
  delta_nonzero int values of the difference that are not zero
  delta_linf float largest of them
  pre_state_equal bool native state before the addition is H_P, bit for bit
  post_state_equal bool the sum is H_B, bit for bit
  prefork_equal int layers before the fork that are equal
  prefork_checkpoints int of these
  post_mhc_equal int post-mHC checkpoints that are equal
  post_mhc_checkpoints int of these: (L - f) + (n - 1) L
  routes_equal int route checkpoints that are equal
  route_checkpoints int of these: n L
  predictions_equal int predictions that are equal
  predictions int of these: n + 1
  text_equal bool whether the decoded texts are equal
  endpoint_sha256 str of H_B
  tokens_sha256 str of the predictions of the branch
  paper_post_mhc_equal str in the paper, of another model
  paper_routes_equal str in the paper, of another model
  """,
)

MHC = table(
  "mhc_equivalence",
  "Post-mHC substitution, checkpoint by checkpoint.",
  "prompt scheme step layer",
  """
  prompt str id of the prompt
  scheme str of the branch
  step int decode input, from 0, the event
  layer int of the checkpoint
  compared bool whether the post-mHC state counts: not before the endpoint of the fork
  post_mhc_equal bool bit for bit
  linf float largest difference
  route_equal bool the same experts
  branch_sha256 str of the post-mHC state of the branch
  injected_sha256 str of the one that was substituted
  """,
)

MHC_PREFORK = table(
  "mhc_prefork_equivalence",
  "Layers before the fork: the branch against a run without any probe, in another process.",
  "prompt scheme layer",
  """
  prompt str id of the prompt
  scheme str of the branch
  layer int before the fork
  values int in the state
  equal bool bit for bit
  linf float largest difference
  branch_sha256 str of the branch
  native_sha256 str of the run without a probe
  """,
)

KV_SUMMARY = table(
  "kv_equivalence_summary",
  "Persistent-state substitution: native + (S_B - S_P) at the boundary after the event.",
  "prompt scheme",
  """
  prompt str id of the prompt
  scheme str of the branch
  layer int of the fork
  position int of the event
  branch int class that was substituted
  refused int classes taken up before it
  vacuous bool whether its continuation is the native one: the control shows nothing
  next_token_equal bool branch and native read the same next token, unforced
  values int in the persistent state
  differing int of them
  delta_linf float largest difference of finite values
  layers_untouched int layers from 0 on whose state is equal
  fp64_layers int layers that the FP64 difference rebuilds
  fp64_exceptions int values that it cannot carry
  fp32_layers int layers that a literal FP32 difference rebuilds
  xor_layers int layers that a difference of bits rebuilds
  layers int of all
  used str the kind of difference that went on: fp64, or xor where fp64 is not exact
  post_mhc_equal int post-mHC checkpoints that are equal
  states_equal int persistent-state checkpoints that are equal
  routes_equal int route checkpoints that are equal
  checkpoints int of each: (n - 1) L
  predictions_equal int predictions that are equal
  predictions int of these: n + 1
  text_equal bool whether the decoded texts are equal
  endpoint_sha256 str of S_B: of its layers' hashes
  tokens_sha256 str of the predictions of the branch
  paper_differing str in the paper, of another model
  paper_fp32_layers str in the paper, of another model
  paper_states_equal str in the paper, of another model
  """,
)

KV = table(
  "kv_equivalence",
  "Persistent-state substitution, checkpoint by checkpoint.",
  "prompt scheme step layer",
  """
  prompt str id of the prompt
  scheme str of the branch
  step int decode input, from 1, the first after the boundary
  layer int of the checkpoint
  post_mhc_equal bool bit for bit
  state_equal bool persistent state of the layer, bit for bit
  route_equal bool the same experts
  branch_sha256 str of the persistent state of the layer in the branch
  injected_sha256 str of the one that was substituted
  """,
)

KV_LAYERS = table(
  "kv_equivalence_layers",
  "The difference of the persistent states, layer by layer.",
  "prompt scheme layer",
  """
  prompt str id of the prompt
  scheme str of the branch
  layer int of the state
  values int in it
  differing int of them
  linf float largest difference of finite values
  fp64_equal bool rebuilt by the FP64 difference
  fp64_exceptions int values that it cannot carry
  fp32_equal bool rebuilt by a literal FP32 difference
  xor_equal bool rebuilt by a difference of bits
  native_sha256 str of the native state
  branch_sha256 str of the branch's
  """,
)

EVENT_COUNTS = table(
  "event_direction_counts",
  "Volumes of each direction of a continuation, by who labelled the texts.",
  "prompt scheme source status label",
  """
  prompt str id of the prompt
  scheme str of the branches
  source str "rule", or "people" for their consensus
  status str labelled, unlabelled or disagreeing
  label str? direction
  class_count int classes
  classes int of all
  order_count int orders
  orders int of all
  paper str the paper's count, of another model
  """,
)

EVENT_UNIQUE = table(
  "event_direction_unique_continuations",
  "The unique texts: the units that are labelled.",
  "prompt scheme item",
  """
  prompt str id of the prompt
  scheme str of the branches
  item int number in the blind form
  class_count int classes that go on with the text
  classes int of all
  provisional str label of the rule
  consensus str? label of all people who filled in a form; nothing where they disagree
  tokens_sha256 str of the token ids of the lowest class
  text text the continuation
  """,
)

AGREEMENT = table(
  "human_annotation_agreement",
  "Agreement of each two columns of labels; people's among themselves, and each with the rule.",
  "first second",
  """
  first str a column
  second str another
  items int unique texts
  excluded int left blank in one or both
  compared int the others
  agreed int same label
  raw float? agreed / compared
  kappa float? Cohen's
  """,
)

CONFUSION = table(
  "human_annotation_confusion",
  "Label pairs of each two columns.",
  "first second first_label second_label",
  """
  first str a column
  second str another
  first_label str in the first
  second_label str in the second
  count int items
  """,
)

REPLAY_BRANCHES = table(
  "replay_branches",
  "The classes drawn from the two directions, extended.",
  "branch",
  """
  prompt str id of the prompt
  scheme str of the branches
  branch int class
  order str its lowest order
  label str provisional, of the rule
  num_tokens int emitted
  prefix_equal bool whether the first tokens are those of the sweep
  tokens str emitted ids, joined by commas
  tokens_sha256 str of the same
  text text the continuation
  """,
)

REPLAY_PAIRS = table(
  "replay_pairs",
  "Each of those run twice alone, in fresh processes with other thread settings.",
  "branch",
  """
  branch int class
  runs int processes
  num_tokens int per run
  tokens_equal bool between the runs
  like_sweep bool both equal the branch in the sweep
  sha256_equal bool of the token ids
  metadata_equal bool same checkpoint, tokenizer, contract and mode in both records
  exit_zero bool both ended well
  first_sha256 str of the token ids
  second_sha256 str of the token ids
  """,
)

REPLAY_ENVIRONMENT = table(
  "replay_environment",
  "Where the replays ran.",
  "run name",
  """
  run int process
  name str of a setting or a measured property
  value text its value
  """,
)

BREADTH = table(
  "breadth_summary",
  "Prompts whose farthest branch has left the native text, staged: survivors only go on.",
  "horizon by group",
  """
  horizon int emitted tokens
  by str all, language or kind
  group str which
  prompts int at the start
  at_risk int not separated at an earlier horizon
  new int separated at this one
  cumulative int separated so far
  saved int rows that say separated
  repeated int of them of prompts separated earlier
  paper_cumulative str in the paper, of another model
  """,
)

BREADTH_BRANCHES = table(
  "breadth_branches",
  "Raw: the branch of each prompt, and each horizon that it was run to.",
  "prompt horizon",
  """
  prompt str id of the prompt
  horizon int emitted tokens
  layer int of the fork
  scheme str of the branch
  branch int class with the farthest post-mHC state
  order str its lowest order
  classes int compared
  states int distinct post-mHC states among them
  states_unlike_native int classes whose post-mHC state is not the native one
  state_linf float distance of the branch's
  separated bool whether its tokens differ from native within the horizon
  native_tokens str emitted ids, joined by commas
  branch_tokens str the same of the branch
  """,
)
