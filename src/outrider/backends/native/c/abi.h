/* What Python and C share: structures, constants and functions, described here alone. Python reads this text through
   cffi (`abi.py`), so it holds plain declarations only: no conditionals, includes, inline functions or macros other
   than integers. C code includes `types.h`, which includes this file once, after a guard.

   Three number types differ between builds, and Python passes them by address alone: `weight_t` (weights), `kv_t`
   (keys, values, features and embeddings of drafters) and `act_t` (activations, as a product reads them). Each is
   float32 or bfloat16.

   Arrays are dense and row-major; their shapes stand in brackets. "Workspace" is memory that a call writes over; its
   contents mean nothing between calls. Pointers may be NULL only where that is said. Everything that a structure
   points to belongs to the caller, and must live until the call returns. */

/* Kinds of matrices (`formats/layout.h`). PLAIN: weights as they are. Then blocks of BLOCK_WEIGHTS, which the GEMM
   dequantises (BF12: bfloat16 in twelve bits). INTEGER and a GGUF kind: the quants of that kind, which are multiplied by
   activations rounded to int8 (`formats/int8.h`). */
enum { PLAIN, Q4, Q8, BF12, Q4K, Q5, Q5K, Q6K, Q3K, IQ4, IQ4K, MXFP4, INTEGER = 256 };

enum { RMS_NORM, LAYER_NORM }; /* kinds of norms */
enum { SILU, GELU, GELU_TANH, RELU, RELU2 }; /* activations; GELU_TANH: its approximation; RELU2: squared */
enum { NORM_HEADS_ALIKE, NORM_EACH_HEAD, NORM_ALL_HEADS }; /* norms of queries and keys: of every head with the same
   weights, of every head with its own, or of all heads together */

#define BLOCK_WEIGHTS 32 /* weights of a block */
#define MAX_HEAD_DIM 256 /* of an attention head */
#define MAX_FED_PAIRS 16 /* pairs of a row that `draft_tree` feeds through the drafter's layer at once */
#define EXPERT_ROWS 1024 /* rows of a pass whose experts are computed together */
#define CHANGE_BYTES 24 /* of `Walk.scratch`, for each changed token: its id and four float32 */

/* y = x W^T. */
typedef struct {
    const void *data; /* rows, one for each output; in blocks, four rows lie together (INTEGER: sixteen) */
    int64_t kind;
} Matrix;

/* A mixture of experts in place of a layer's MLP; its sizes stand in `Model`. Each row is computed by the `top_k`
   experts with the greatest router logits; ties go to the lower index. Biases may be NULL. */
typedef struct {
    Matrix router; /* [experts, hidden] */
    const float *router_bias;
    int64_t normalised; /* 1: weights are the softmax of the chosen logits; 0: of all logits */
    const Matrix *gate, *up, *down; /* [experts], each [expert_intermediate, hidden] or [hidden, expert_intermediate] */
    const float *gate_bias, *up_bias, *down_bias; /* [experts, expert_intermediate] or [experts, hidden] */
    /* A limit that is not 0: with g = min(gate(x), limit) and u = up(x) within -limit .. limit, the inner layer is
       g sigmoid(alpha g) (u + 1), whatever the model's activation. */
    float alpha, limit;
    /* The expert that computes all rows, whose weight is the sigmoid of one more logit. */
    Matrix shared_router, shared_gate, shared_up, shared_down;
} Experts;

/* A norm. */
typedef struct {
    const float *weight; /* NULL: no norm */
    const float *bias; /* or NULL */
    int64_t kind;
} Norm;

/* A decoder layer. Norms may be missing; biases may be NULL. An MLP is down(activation(gate(x)) * up(x)), or
   down(activation(up(x))) where `gate.data` is NULL. */
typedef struct {
    Matrix q, k, v, o, gate, up, down;
    Norm attention_norm, mlp_norm; /* of what attention and the MLP read: [hidden] */
    Norm attention_post_norm, mlp_post_norm; /* of what they add to the hidden states: [hidden] */
    Norm q_norm, k_norm; /* [head_dim], or [heads or kv_heads, head_dim] */
    int64_t qk_norm_span; /* NORM_HEADS_ALIKE, ... */
    const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
    const float *sinks; /* [heads]: scores of attention sinks, which have no value; or NULL */
    int64_t parallel; /* 1: the MLP reads what attention reads (or its own norm of that); 0: what attention wrote */
    int64_t window; /* of sliding-window attention; 0: none */
    int64_t rope; /* 1, 2, ...: which rotary table; 0: no rotary position embeddings */
    const Experts *experts; /* in place of `gate`, `up` and `down`; NULL: none */
} Layer;

typedef struct {
    int64_t hidden, intermediate, heads, kv_heads, head_dim, layers, vocab;
    int64_t experts, top_k, expert_intermediate, shared_intermediate; /* of layers with experts, at most `hidden` */
    float eps, attention_scale;
    int64_t activation; /* SILU, ... */
    int64_t rotary_dim; /* the first elements of a head, which are rotated; 0: all */
    int64_t unpadded_head_dim; /* the first elements of a head, which norms of heads average; the others are zeros;
                                  0: all */
    /* Factors; 0: none. Embeddings are multiplied when they are looked up. */
    float embedding_scale, residual_scale, logit_scale;
    /* Caps c: x becomes c tanh(x / c); 0: none. */
    float score_cap, logit_cap;
    const Layer *layer;
    Norm norm; /* before the head */
    Matrix head; /* `data` is NULL: no logits */
    const float *head_bias; /* [vocab], or NULL */
    const float *position_embeddings; /* [position_rows, hidden], added to the embeddings; or NULL */
    int64_t position_rows;
    /* [hidden, input_dim]: makes hidden states of `Pass.inputs`; `data` is NULL: none. */
    Matrix input_proj;
    const float *input_bias;
    int64_t input_dim;
    /* [2 * hidden]: EAGLE-3's norms of `Pass.inputs`, which are an embedding and a hidden state side by side; or NULL.
       With these, `norm` is the head's alone. */
    const float *pair_norms;
} Model;

/* Workspace of layers with experts, for `n` rows: at most EXPERT_ROWS. The choices of a row are in falling order of its
   logits; those of all rows, by expert and then by row, are `top_k` * n slots. */
typedef struct {
    float *logits; /* [n, experts + 1]: the last one is the shared expert's */
    int64_t *chosen, *slot; /* [n, top_k]: experts, and where they are computed */
    float *weight; /* [n, top_k + 1] */
    int64_t *starts; /* [experts + 1]: the first slot of each expert */
    act_t *inputs; /* [slots, hidden] */
    act_t *inner; /* [slots, expert_intermediate], and [n, shared_intermediate] */
    float *outputs; /* [slots + n, hidden]: after the slots, the shared expert's */
} ExpertWork;

/* One pass over tree nodes, or over a chunk of prompts. */
typedef struct {
    int64_t rows; /* batch size */
    int64_t nodes; /* of each row, the nodes `first_node` .. `total_nodes` - 1 are computed: so many */
    int64_t first_node, total_nodes;
    int64_t capacity; /* slots of a row in the KV cache */
    int64_t shared_tree; /* 1: `ancestors` holds one tree for all rows */
    const int64_t *lengths; /* [rows]: committed tokens, in the first slots */
    const int64_t *positions; /* [rows, total_nodes] */
    const int64_t *sizes; /* [rows]: nodes of each row, then padding; NULL: all */
    const uint8_t *ancestors; /* [rows or 1, total_nodes, total_nodes]: 1 where a node sees another; NULL for a chunk */
    kv_t *const *cache; /* [layers, 2]: keys and values, each [rows, capacity, slot_layers * kv_heads * head_dim] */
    const float *rope; /* [tables, rope_positions, 2, rotary_dim]: cosines and sines */
    int64_t rope_positions;
    const float *inputs; /* [rows * nodes, input_dim] */
    const int64_t *tokens; /* [rows * nodes], whose embeddings are looked up; NULL: `hidden_states` hold them */
    const weight_t *embeddings; /* [embedding_rows, hidden] */
    int64_t embedding_rows;
    float *hidden_states; /* [rows * nodes, hidden]: updated in place, without padding between rows */
    /* Workspace: [rows * nodes, hidden or input_dim], twice [rows * nodes, heads * head_dim], [rows * nodes,
       intermediate], and [rows * nodes, max((heads + 2 * kv_heads) * head_dim, hidden)]. */
    act_t *normed, *query, *attention, *mlp;
    float *qkv;
    ExpertWork experts; /* where the model has layers with experts */
    int32_t *paths; /* workspace: [rows * nodes, total_nodes] */
    int32_t *real_nodes; /* workspace: [rows * nodes]: the nodes that are not padding, in order */
    int64_t *row_starts; /* workspace: [rows + 1]: where each row begins among these */
    int64_t taps;
    const int64_t *tap_layers; /* [taps]: layers before which hidden states are copied; `layers`: after the last norm */
    float *tapped; /* [taps, rows * nodes, hidden]; NULL: `features` are written instead */
    kv_t *const *features; /* [taps], each [rows * nodes, hidden] */
    int64_t logit_count; /* nodes of each row whose logits are computed */
    const int64_t *logit_nodes; /* [logit_count]: these, counted from `first_node`, ascending */
    int64_t own_logit_nodes; /* 1: each row has its own, and `logit_nodes` is [rows, logit_count] */
    float *logits; /* [rows, logit_count, vocab] */
    int64_t threads; /* at most */
    int64_t slot_layers; /* layers whose keys and values lie side by side in a slot; 0: as 1 */
    int64_t *logit_from, *logit_to; /* workspace: [rows * nodes] each */
    char *scratch; /* workspace: [threads, scratch_each] bytes */
    int64_t scratch_each; /* at least `scratch_bytes` */
} Pass;

/* A call that drafts a tree for every row. */
typedef struct {
    /* Committed text that the drafter has not read yet: each pending entry is the target's features at a position, and
       the token after it. */
    int64_t most_pending; /* of any row */
    const int64_t *pending; /* [rows]: entries of each row; their features and tokens lie row by row, without gaps */
    const kv_t *const *features; /* [entries, taps]: each [feature_dim] */
    const int64_t *next_tokens; /* [entries] */
    Matrix fuse; /* [hidden, taps * feature_dim]: EAGLE-3's; `data` is NULL: none, and `taps` is 1 */
    int64_t taps, feature_dim;
    int64_t *lengths; /* [rows]: entries read so far; updated */
    /* The shape of the tree. */
    int64_t depth, width; /* layers at most (0: no tree); nodes fed to the network for each layer */
    int64_t top_k; /* candidates below a node */
    int64_t pool; /* likeliest tokens to which noise is added */
    float scale; /* confidences are softmax(logits / scale) */
    float floor, reach; /* log values below which nodes are dropped, and below which no layer is fed */
    int64_t max_nodes; /* to keep, the root included */
    int64_t max_priced; /* length of `seconds`; 0: no price */
    int64_t price_total; /* 1: `seconds` are by the drafted nodes of all rows together; 0: of the widest row */
    const double *seconds; /* [max_priced]: of a round that verifies so many drafted nodes */
    double trust; /* expected acceptance = trust * confidence */
    const uint8_t *embeddings; /* the table [embedding_rows, hidden], as a model's file has it */
    int64_t embedding_rows, embedding_kind; /* GGUF's number of the kind of its weights */
    int64_t embedding_bf16; /* 1: they are rounded to bfloat16 */
    float embedding_scale; /* and then multiplied by this; 0: not */
    const int64_t *token_ids; /* of the head's rows; NULL: these are the ids */
    const float *temperature; /* [rows] */
    const uint64_t *seeds; /* [rows], of the noise; NULL: none */
    const int64_t *start_positions; /* [rows]: of the roots */
    const int32_t *knots, *slopes; /* tables of core/noise.py */
    const int64_t *roots; /* [rows]: token ids */
    float *last_hidden; /* [rows, hidden]: what the candidates below the roots come from; updated */
    /* Workspace of the ranking, for each of `items` = rows * max(depth, width). */
    float *noisy; /* [items, pool] */
    float *top_values; /* [items, pool + top_k] */
    int64_t *top_columns; /* the same */
    /* Workspace of the selection. */
    float *all_values, *sorted_values; /* [rows * max_nodes] */
    float *best_values; /* [max(max_nodes, width)] */
    int64_t *order, *new_index; /* [rows * max_nodes], [max_candidates] */
    double *gains; /* [rows * max_nodes] */
    int64_t *ends; /* [rows]: fed nodes of each row */
    /* Workspace of reading many entries: each row's last one. */
    const kv_t **last_features; /* [rows, taps] */
    int64_t *last_tokens, *last_pending; /* [rows] */
    /* Workspace of the nodes that are fed: `fed_nodes` = (depth - 1) * width for each row. */
    float *hidden_states; /* [rows, fed_nodes, hidden] */
    int64_t *positions; /* [rows, fed_nodes or most_pending] */
    uint8_t *ancestors; /* [rows, fed_nodes, fed_nodes] */
    int64_t *fed_candidate; /* [rows, fed_nodes]: the candidate of each; -1: none */
    /* Workspace of the candidates, [rows, max_candidates]; candidate 0 is the root. */
    int64_t max_candidates;
    int64_t *token, *parent, *level;
    int64_t *fed; /* index among the fed nodes; -1: not fed */
    int64_t *chosen;
    float *value; /* log of the product of the confidences along its path */
    /* Results. */
    int64_t widest; /* nodes of the largest tree */
    int64_t *size; /* [rows]: nodes of each tree */
    int64_t *tokens, *parents, *depths; /* [rows, widest] */
    int64_t *fed_index; /* [rows, widest]: 1 + index among the fed nodes; 0: root; -1: not fed. NULL: not wanted */
    float *values; /* [rows, widest] */
    uint8_t *visible; /* [rows, widest, widest]: 1 where a node sees another */
} Draft;

/* Drafters of one pass: slots with candidates each, and the best tree of this lattice. */
typedef struct {
    Matrix feature_proj; /* [hidden, taps * hidden]: context vectors of features, before their norm */
    Matrix seed; /* [slots * hidden, 2 * hidden]: added to the slots, from the last context vector and the anchor;
                             `data` is NULL: none */
    const float *norm; /* of context vectors */
    const float *mask; /* [hidden]: the input of the slots after the first */
    int64_t taps; /* features of a position */
    int64_t first_slot; /* the slot that drafts the first token */
    int64_t rank; /* of the scores of token pairs; 0: none */
    const kv_t *pair_left, *pair_right; /* [tokens, rank] and [head rows, rank] */
    const int64_t *max_depths; /* [rows] */
    int64_t *columns; /* workspace: [rows, depth, top_k]: candidates of the slots */
    float *confidences; /* workspace: the same: logs */
    float *logs; /* workspace: [rows, max_nodes, top_k]: of the candidates below a node, best first */
    int64_t *order; /* workspace: the same: which candidates these are */
    int64_t *next; /* workspace: [rows, max_nodes]: how many children of a node were taken */
    double *value; /* workspace: the same: logs of the product of confidences */
} Lattice;

/* Medusa's heads. */
typedef struct {
    Matrix blocks; /* [heads * hidden, hidden]: the residual block of every head */
    const float *bias; /* [heads * hidden] */
    const Matrix *lm_heads; /* [heads], each [vocab, hidden]; NULL: the heads share the model's */
    const float *lm_head_bias; /* [heads, vocab]; NULL: none */
    float *output; /* workspace: [rows, depth * hidden] */
} MedusaHeads;

/* One of Hydra's heads. It reads the row's feature and the embeddings of a node's path. */
typedef struct {
    Matrix block; /* [2 * hidden, (2 + layer) * hidden]: the residual map, and below it the one after SiLU */
    const float *bias; /* [2 * hidden] */
    Matrix head; /* [vocab, hidden] */
    const float *head_bias; /* [vocab] */
} HydraHead;

/* A Mamba-2 layer. */
typedef struct {
    Matrix in_proj, out_proj; /* [in_proj_rows, hidden]: gate, convolution inputs, time steps; [hidden, intermediate] */
    const float *norm; /* [hidden] */
    const float *conv_weight; /* [channels, conv_kernel] */
    const float *conv_bias; /* [channels] */
    const float *dt_bias, *a, *d; /* [heads]; a: the decay rate, negative; d: the skip connection */
    const float *gated_norm; /* [intermediate] */
} MambaLayer;

typedef struct {
    int64_t hidden, intermediate, heads, head_dim, state_size, groups, conv_kernel, layers, vocab;
    int64_t in_proj_rows;
    int64_t norm_group; /* elements that `gated_norm` normalises together */
    float eps, gated_eps, dt_min, dt_max;
    const MambaLayer *layer;
    const float *norm;
    Matrix head;
    const kv_t *embeddings; /* [embedding_rows, hidden] */
    int64_t embedding_rows;
} Mamba;

/* The recurrent states of a Mamba-2, of several nodes of every row. */
typedef struct {
    int64_t slots; /* of a row */
    kv_t *conv; /* [layers, rows, slots, channels, conv_kernel - 1] */
    float *ssm; /* [layers, rows, slots, heads, head_dim, state_size] */
    int64_t *source, *target, *token; /* of every node of a step: slots (counted over all rows), and its token */
} MambaStates;

/* The coupled rule: each row's walk down its tree. */
typedef struct {
    int64_t rows, nodes, vocab;
    int64_t depth; /* steps at most */
    float *logits; /* [rows, nodes, vocab]; changed and restored during the call */
    const int64_t *tokens, *parents; /* [rows, nodes] */
    const int64_t *sizes; /* [rows] */
    const float *temperature; /* [rows]; 0: no noise */
    const int64_t *top_k; /* [rows]; 0: all */
    const double *top_p, *min_p; /* [rows]; 1 and 0: all */
    const int64_t *changes; /* [rows]: tokens whose logits penalties and biases change; NULL: none in any row */
    const int64_t *const *changed; /* [rows], each [changes]: their ids */
    const float *const *counts; /* [rows], each [changes]: occurrences since the prompt */
    const float *const *factors; /* [rows], each [changes]: of the repetition penalty */
    const float *const *biases; /* [rows], each [changes] */
    const float *repetition, *presence, *frequency; /* [rows] */
    const int64_t *penalised; /* [rows]: 1 where a drawn token changes the logits that follow */
    int64_t changes_capacity; /* of a row in `scratch`: the most `changes`, and a path */
    char *scratch; /* workspace: [rows, changes_capacity, CHANGE_BYTES] */
    const uint64_t *seeds; /* [rows] */
    const int64_t *start_positions; /* [rows]: of the roots */
    const int32_t *knots, *slopes; /* tables of core/noise.py */
    /* [rows, depth + 4]: nodes of the path (0: rounding could decide, nothing was drawn), the token that ends it,
       whether the logits of all drawn tokens are finite, and the path, padded with 0. */
    int64_t *result;
    int64_t threads;
} Walk;

/* What a build can do. */
extern const int64_t block_lanes; /* lanes for which it opens blocks: 8 or 16; 0: it opens none */
extern const int64_t bf16_weights; /* 1: weights are bfloat16; 0: float32 */

/* Bytes of scratch for each thread of a pass over `rows`, whose widest product has so many inputs. */
int64_t scratch_bytes(int64_t rows, int64_t width);

void forward(const Model *model, const Pass *pass);

/* Trees of EAGLE-2's kind. `head`: the model's head alone, without layers. */
void draft_tree(const Model *step, const Model *head, Pass *pass, Draft *draft);

/* `depth` 0: read what is pending alone. `max_nodes` 0: no tree, the slots' logits alone. */
void draft_block(const Model *model, const Lattice *lattice, Pass *pass, Draft *draft);

/* `max_nodes` 0: no tree, the heads' logits alone. */
void draft_medusa(const Model *model, const MedusaHeads *heads, const Lattice *lattice, Pass *pass, Draft *draft);

/* `residual`: workspace, [rows * width, 2 * hidden]. */
void draft_hydra(const Model *model, const HydraHead *heads, float *residual, Pass *pass, Draft *draft);

/* One step: the logits of one head below each of a row's `width` nodes, which `fed_candidate` [rows, width] names among
   `token` and `parent` [rows, max_candidates]. `layer`: which head; 0 reads the roots. `depth` must be 2. */
void step_hydra(
    const Model *model, const HydraHead *heads, float *residual, Pass *pass, const Draft *draft, int64_t layer
);

/* `depth` 0: read what is pending, the root last, and compute the logits after it. */
void draft_mamba(const Mamba *mamba, const MambaStates *states, Pass *pass, Draft *draft);

/* Read `count` tokens, those of a row in order: a row's tokens name the same slot as source and target, whose state is
   updated in place. No logits are computed. */
void read_mamba(const Mamba *mamba, const MambaStates *states, Pass *pass, int64_t count);

/* One step of `count` nodes. */
void step_mamba(const Mamba *mamba, const MambaStates *states, Pass *pass, int64_t count);

void walk_trees(const Walk *walk);

/* Rows of `width` weights of a GGUF kind, as float32, or rounded to bfloat16 with `halves`. `order`: the file's row
   for each result row; NULL: the same. Returns the rows written: 0 where the kind is not supported or `width` is not a
   multiple of its block. */
int64_t dequantise(
    int64_t kind, const uint8_t *from, int64_t rows, int64_t width, const int64_t *order, void *to, int64_t halves,
    int64_t threads
);

/* Bytes of a row of a GGUF kind in the kernels' order; 0: this build does not read the kind. */
int64_t repacked_bytes(int64_t kind, int64_t width);

/* Rows of a GGUF kind in the kernels' order, padded with rows of zeros to a multiple of four. Returns their kind; PLAIN
   where a scale is NaN, infinite or too large. */
int64_t
repack(int64_t kind, const uint8_t *from, int64_t rows, int64_t width, const int64_t *order, char *to, int64_t threads);

/* Weights of a matrix in blocks, [outputs, width], `outputs` a multiple of four. Where `block_lanes` is not 0. */
void unpack_matrix(const Matrix *matrix, int64_t outputs, int64_t width, weight_t *to, int64_t threads);

/* bfloat16 weights [outputs, width] as BF12. `others`: memory for `capacity` tables of 32 bytes, to which rows refer.
   Returns 0 where a matrix cannot be written so. Where `block_lanes` is 8. */
int64_t pack_bf12(
    const weight_t *from, int64_t outputs, int64_t width, char *to, void *others, int64_t capacity, int64_t threads
);

/* Bytes of a matrix of a GGUF kind for integer products; 0: the kind has none, or not at this width. */
int64_t int8_bytes(int64_t kind, int64_t rows, int64_t width);

/* Rows of a GGUF kind for integer products: their own quants, or with `rounded` their weights rounded to Q8_0 (to which
   `int8_bytes` refers then). `order`: as of `dequantise`. Returns the matrix's kind; PLAIN where a scale is not
   finite or float16 does not hold it. */
int64_t pack_int8(
    int64_t kind, const uint8_t *from, int64_t rows, int64_t width, const int64_t *order, int64_t rounded, char *to,
    int64_t threads
);

/* The weights of a matrix for integer products, float32 [rows, width]. */
void unpack_int8(const Matrix *matrix, int64_t rows, int64_t width, float *to);

/* y = x W^T. `activations`: workspace, of x's shape; `scratch`: workspace, `scratch_bytes` for each thread. */
void multiply(
    const Matrix *matrix, const float *x, int64_t rows, int64_t width, int64_t outputs, float *y, int64_t threads,
    act_t *activations, char *scratch
);

/* What suits the processor: bytes of its first-level cache; 1 where weights are prefetched into the second-level cache,
   else 0; columns of weights that lie between the one that is multiplied and the one that is prefetched. Called once,
   before the first pass. */
void tune(int64_t first_cache, int64_t second, int64_t ahead);

/* 1: threads are those of this library's own pool, even where the process has OpenMP's (`threads.h`). Set in tests. */
extern int64_t own_pool;

/* How many threads other programs leave to this one (`threads.h`). Called from Python in tests alone. */
int64_t usable_threads(int64_t threads);
void adapt_threads(int64_t allowed, int64_t threads, int64_t duration, int64_t waited);
