// Which cluster has which pair, where a sequence's pairs have as many clusters as its length asks for: one, or several
// if it is much longer than the others. Lengths are known on the GPU alone, so each warp looks at all of them.
#pragma once
#include "decode.cuh"
#include "longest_first.cuh"

// Of C clusters, as many as there are pairs or as the GPU holds at once, each would have the C-th part of all keys, its
// share. A pair with more than one and a half shares is cut for a power of two of clusters, with more than three
// quarters of one each. These and the whole pairs are a grid's items, longest first. It has a cluster for each pair.
// Where pairs are cut, there are more items, and a cluster that is done takes a further one.
// Of few pairs a grid has more clusters than pairs, and some may have no item. There a pair has any number of parts, so
// that the largest is as small as can be. Only batch-invariant it is a power of two: of pairs from one and three
// quarters of a share on, or from two if all are about as long as each other. Within a 32nd of the longest all pairs
// have as many, in the grid's order: to see that takes few instructions.
struct ByLength {
  static constexpr bool BY_LENGTH = true;
  static constexpr int MOST = 64, MOST_POWER_OF_TWO = 16;  // clusters of a pair
  static constexpr int LEAST_BITS = 2;  // a cluster has so many tiles for each warp at least: 1 << LEAST_BITS
  static constexpr int SEQUENCES = 32 * HELD;  // of a batch, at most
  static_assert(THREADS >= SEQUENCES, "each thread asks for one sequence's lengths");
  int2 before, now;  // those that this thread asks for, before and after the launch ahead of this one is complete
  int2 known[HELD];  // the lane's, before that
  int2 own;          // those of this cluster's sequence

  DEVICE void start(const Decode& a) {
    const int n = blockIdx.z * gridDim.y + blockIdx.y;
    item = few_pairs(a) && a.block_bits == 0 ? one_of_two(n, of_grid()) : n;
  }
  // Lengths may change meanwhile, so all warps of a block take the same ones, from `all`.
  DEVICE void read_lengths(const Decode& a, int2 (&all)[SEQUENCES]) {
    before = of_thread(a);
    if (threadIdx.x < SEQUENCES) all[threadIdx.x] = before;
    sequence_ = blockIdx.z, pair_ = blockIdx.y, part = items = 0, clusters_ = 1;
    if (few_pairs(a)) {
      const int sequence = a.pairs.quotient(item);
      sequence_ = min(sequence, a.batch - 1), pair_ = item - sequence * int(a.pairs.d);
    }
    __syncthreads();  // `all` complete
#pragma unroll
    for (int i = 0; i < HELD; ++i) known[i] = all[sequence_of_lane(i)];
    own = all[sequence_];
    __syncthreads();  // `all` consumed
  }
  DEVICE void find(const Decode& a) {
    none_ = item >= a.all_pairs();
    Shares shares(a, known);
    if (shares.are_alike()) {
      clusters_ = shares.of_each();
      if (clusters_ > 1) find_alike(a);
      return;
    }
    shares.cut();
    if (shares.differ()) find_among(a, shares);
  }
  DEVICE bool none() const { return none_; }  // no item is this cluster's
  DEVICE void read_again(const Decode& a) { now = of_thread(a); }
  DEVICE bool holds(const Decode&) const { return now.x == before.x && now.y == before.y; }  // what this thread sees
  DEVICE int b() const { return sequence_; }
  DEVICE int pair() const { return pair_; }       // of the sequence's
  DEVICE int cluster(int) const { return part; }  // of the pair's
  DEVICE int clusters(const Decode&) const { return clusters_; }
  DEVICE int64_t first(const Decode&) const { return item - part; }

  // Whether clusters take further items.
  DEVICE bool more() const { return items > of_grid(); }
  // Asks for the next one, long before it is looked at. It is counted behind the pairs' counters: in each launch once
  // for every item, as each cluster comes once in vain.
  DEVICE int ask(const Decode& a) const { return atomicAdd(counter(a), 1); }
  // The item that was asked for, or -1.
  DEVICE int further(const Decode& a, int asked) const {
    if (asked == items - 1) *counter(a) = 0;  // for the next launch
    return of_grid() + asked < items ? of_grid() + asked : -1;
  }
  DEVICE void go_on(int further) { item = further; }

 private:
  int item, items;  // this cluster's; of all, if a pair is cut
  int sequence_, pair_, part, clusters_;
  bool none_ = false;

  static DEVICE int* counter(const Decode& a) { return &a.counters[a.all_pairs() << a.block_bits]; }
  static DEVICE int of_grid() { return gridDim.y * gridDim.z; }
  static DEVICE bool few_pairs(const Decode& a) { return gridDim.z > a.batch; }
  static DEVICE int sequence_of_lane(int i) { return threadIdx.x % 32 + 32 * i; }
  static DEVICE int2 of_thread(const Decode& a) {
    return threadIdx.x < a.batch ? lengths(a, threadIdx.x) : int2{};
  }

  // The keys of each of the lane's sequences, and how its pairs are cut.
  struct Shares {
    unsigned keys[HELD], longest = 0, shortest = ~0u;
    float of_a_key;
    float parts;  // that a share is counted as, at most
    const Decode& a;

    DEVICE Shares(const Decode& a, const int2 (&lengths)[HELD]) : a(a) {
      const bool all_seen = !a.leftpad_k && !a.window;
#pragma unroll
      for (int i = 0; i < HELD; ++i) keys[i] = 0;
#pragma unroll
      for (int i = 0; i < HELD; ++i) {  // few instructions: they run once, ahead of the first copy
        if (i == 1 && a.batch <= 32) break;
        unsigned seen = min(max(lengths[i].x, 0), a.kv_len);
        if (!all_seen) seen = max(int(seen) - sequence(a, lengths[i]).begin, 0);
        if (sequence_of_lane(i) >= a.batch) continue;
        keys[i] = seen, longest = max(longest, seen), shortest = min(shortest, seen);
      }
      longest = __reduce_max_sync(~0u, longest), shortest = __reduce_min_sync(~0u, shortest);
    }
    // Whether all are about as long as each other; and then of each pair.
    DEVICE bool are_alike() const { return longest - shortest <= longest / 32; }
    DEVICE int of_each() const { return at_most(a.clusters_of_each, shortest); }
    DEVICE void cut() {
      unsigned sum = 0;
#pragma unroll
      for (int i = 0; i < HELD; ++i) sum += keys[i];
      sum = __reduce_add_sync(~0u, sum), of_a_key = __fdividef(a.clusters_at_once, float(sum) * a.pairs.d);
      parts = parts_of_a_share();
    }
    DEVICE int group(unsigned keys, int clusters) const { return group_of(keys * of_a_key, clusters > 1); }
    DEVICE bool differ() const { return clusters(longest) > 1 || group(longest, 1) != group(shortest, 1); }
    // For a pair.
    DEVICE int clusters(unsigned keys) const { return clusters(keys, parts); }

   private:
    // Of a power of two of parts, two are more than 6 or 7 quarters of a share, or 8 quarters and more, whatever is
    // rounded.
    DEVICE float parts_of_a_share() const {
      if (!few_pairs(a)) return 7.999f / 6;
      if (evenly()) return most_even();
      return longest - shortest > shortest / 8 ? 7.999f / 7 : 1.0001f;
    }
    DEVICE bool evenly() const { return few_pairs(a) && !a.chunks; }
    DEVICE int clusters(unsigned keys, float parts) const {
      const float by_shares = keys * of_a_key * parts;
      return at_most(evenly() ? __float2int_ru(by_shares) : int(by_shares), keys);
    }
    DEVICE int at_most(int clusters, unsigned keys) const {
      const int by_keys = keys >> (LEAST_BITS + a.block_bits + WARP_BITS + a.tile_bits);
      if (evenly()) return max(1, min(min(clusters, by_keys), MOST));
      return 1 << (31 - __clz(max(1, min(min(clusters, by_keys), MOST_POWER_OF_TWO))));
    }
    // As many parts of a share as leave the largest one as small as there are clusters for. With one part less for
    // each pair these are enough. Where pairs are more than half of the clusters, several short ones share one.
    DEVICE float most_even() const {
      const float less = __fdividef(float(a.all_pairs()), a.clusters_at_once);
      const bool shared = less > 0.5f;
      float most = 1.0f - less;
#pragma unroll 1
      for (float step = less / 2; step > 0.05f * less; step /= 2) {
        int quarters = 0;  // of clusters, of the lane's
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
          if (sequence_of_lane(i) >= a.batch) continue;
          const float parts = keys[i] * of_a_key * (most + step);
          quarters += shared && parts <= 0.5f ? max(1, __float2int_ru(4 * parts)) : 4 * clusters(keys[i], most + step);
        }
        if (int(__reduce_add_sync(~0u, quarters) * a.pairs.d) <= 4 * a.clusters_at_once) most += step;
      }
      return most;
    }
  };

  // Each pair has as many clusters.
  DEVICE void find_alike(const Decode& a) {
    items = clusters_ * a.all_pairs();
    none_ = item >= items;
    const int n = none_ ? 0 : item, pair = int(__fdividef(n + 0.5f, clusters_)), sequence = a.pairs.quotient(pair);
    pair_ = pair - sequence * int(a.pairs.d), part = n - pair * clusters_;
    be_of(sequence % 32, sequence / 32);
  }
  DEVICE void find_among(const Decode& a, const Shares& shares) {
    const int pairs = a.pairs.d;
    int clusters_of[HELD], items_of[HELD], group[HELD], of_lane = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      clusters_of[i] = shares.clusters(shares.keys[i]);
      group[i] = shares.group(shares.keys[i], clusters_of[i]);
      items_of[i] = sequence_of_lane(i) < a.batch ? pairs * clusters_of[i] : 0, of_lane += items_of[i];
    }
    items = __reduce_add_sync(~0u, of_lane);
    none_ = item >= items;
    const Place place = place_of(none_ ? 0 : item, items_of, group);
    be_of(place.lane, place.i);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int clusters = __shfl_sync(~0u, clusters_of[i], place.lane);
      if (place.i == i) clusters_ = clusters;
    }
    const int of_sequence = none_ ? 0 : item - place.first;
    pair_ = of_sequence / clusters_, part = of_sequence - pair_ * clusters_;
  }
  // This cluster has a part of the lane's ith sequence.
  DEVICE void be_of(int lane, int i) {
    sequence_ = lane + 32 * i;
#pragma unroll
    for (int n = 0; n < HELD; ++n) {  // a select between pairs of numbers would have them in memory
      const int x = __shfl_sync(~0u, known[n].x, lane), y = __shfl_sync(~0u, known[n].y, lane);
      if (i == n) own = make_int2(x, y);
    }
  }
};
