// A decode step in one call: new tokens are put where they belong, what their queries expect is found, all is read.
// `attention.c` and `router.c` before this.

struct put {  // places beside each other for every head of every row; strides count bytes
    char *to;
    const char *from;
    int64_t rows, heads, to_row, to_head, from_row, from_head, bytes;
};

struct step {  // as kernels/native/step.py writes it
    const struct put *puts;
    int64_t count, place;  // how many are to be put, and at which place all of them
    const struct asked *asked;  // NULL, or of whom a classifier is asked
    const struct layer *layers;
    float *scores;
    const struct shape *shape;
    struct source *sources;
    int64_t number, window;  // of sources, and which of them has the new token too
    const void *queries;
    void *out;
    float *lse;
    int64_t threads;
};

// 0, or 1 where there is no memory left.
int kvs_step(const struct step *in) {
    for (const struct put *put = in->puts; put < in->puts + in->count; put++)
        for (int64_t row = 0; row < put->rows; row++)
            for (int64_t head = 0; head < put->heads; head++)
                memcpy(put->to + row * put->to_row + head * put->to_head + in->place * put->bytes,
                       put->from + row * put->from_row + head * put->from_head, put->bytes);
    in->sources[in->window].count = in->place + 1;
    if (in->asked && kvs_classify(in->asked, in->layers, in->scores, in->threads)) return 1;
    return kvs_attend(in->shape, in->sources, in->number, in->queries, in->out, in->lse, in->threads);
}
