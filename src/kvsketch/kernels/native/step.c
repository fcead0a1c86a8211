// A decode step in one call: new tokens are put where they belong, what their queries expect of buckets is found, all is
// read, and the attention that entries got is noted. `attention.c`, `router.c` and `weights.c` before this.

struct put {  // places beside each other for every head of every row; strides count bytes
    char *to;
    int64_t rows, heads, to_row, to_head, from_row, from_head, bytes;
};

struct note {  // what entries get of a step's queries
    struct weighing how;
    const char *keys;
    const float *log_mass;
    double *got;
    int64_t of_window;  // whether the new token is one of the entries, at the place where it was put
};

#define MOST_PUT 4

struct step {  // as kernels/native/step.py writes it
    // What changes with every token.
    int64_t place, threads;  // the place to which all is put
    const void *queries;
    void *out;
    float *lse;
    const void *unrotated;  // queries to a classifier, where there is one
    int64_t *read;          // and how much is looked up
    int64_t rank;           // it is put in its place too: one of `from` points here
    const char *from[MOST_PUT];
    // What stays.
    const struct put *puts;
    int64_t count;        // how many are to be put
    struct asked *asked;  // NULL, or the queries that a classifier is asked about
    struct choice *choice;  // what its answer chooses
    const struct layer *layers;
    float *scores;
    const struct shape *shape;
    struct source *sources;
    int64_t number, window;  // of sources; which of them has the new token too
    struct note *notes;
    int64_t noted;  // how many of them
};

// 0; where there is no memory left 1, or 2 if something may have been noted.
int kvs_step(const struct step *in) {
    for (int64_t i = 0; i < in->count; i++) {
        const struct put *put = in->puts + i;
        for (int64_t row = 0; row < put->rows; row++)
            for (int64_t head = 0; head < put->heads; head++)
                memcpy(put->to + row * put->to_row + head * put->to_head + in->place * put->bytes,
                       in->from[i] + row * put->from_row + head * put->from_head, put->bytes);
    }
    in->sources[in->window].count = in->place + 1;
    if (in->asked) {
        in->asked->queries = in->unrotated, in->choice->read = in->read;
        if (kvs_classify(in->asked, in->layers, in->scores, in->threads)) return 1;
    }
    if (kvs_attend(in->shape, in->sources, in->number, in->queries, in->out, in->lse, in->threads)) return 1;
    for (struct note *note = in->notes; note < in->notes + in->noted; note++) {
        if (note->of_window) note->how.count = in->place + 1;
        if (kvs_weigh(&note->how, in->queries, note->keys, note->log_mass, in->lse, note->got, in->threads)) return 2;
    }
    return 0;
}
