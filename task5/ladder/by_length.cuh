// Which cluster has which pair, where a sequence's pairs have as many clusters as its length asks for: one, or a power
// of two if it is much longer than the others. Lengths are known on the GPU alone, so each warp looks at all of them.
#pragma once
#include "count.cuh"
#include "decode.cuh"
#include "longest_first.cuh"

// Of C clusters, as many as there are pairs or as the GPU holds at once, each would have the C-th part of all keys, its
// share. A pair with more than one and a half shares is cut for clusters with more than three quarters of one each.
// These and the whole pairs are a grid's items, longest first. It has a cluster for each pair. Where pairs are cut,
// there are more items, and a cluster that is done takes a further one.
// Of few pairs a grid has more clusters than pairs, and some may have no item. There a pair is cut from one and three
// quarters of a share on; or from two, if all are about as long as each other: so no part waits for another one.
struct ByLength {
  static constexpr bool BY_LENGTH = true;
  static constexpr int MOST_BITS = 4;   // 1 << MOST_BITS clusters of a pair, at most
  static constexpr int LEAST_BITS = 2;  // a cluster has so many tiles for each warp at least: 1 << LEAST_BITS
  int2 known[HELD], now[HELD];  // the lane's lengths, before and after the launch ahead of this one is complete
  int2 own;                     // those of this cluster's sequence

  DEVICE void start() { item = blockIdx.z * gridDim.y + blockIdx.y; }
  // Of sequences about as long as each other as the grid says, which takes few instructions to see.
  DEVICE void find(const Decode& a) {
    sequence_ = blockIdx.z, pair_ = blockIdx.y, part = bits_ = items = 0;
    if (few_pairs(a)) sequence_ = min(sequence_, a.batch - 1);
    own = lengths(a, sequence_);
    load(a, known);
    const Shares shares(a, known);
    none_ = item >= a.batch * a.pairs();
    if (shares.differ()) find_among(a, shares);
  }
  DEVICE bool none() const { return none_; }  // no item is this cluster's
  DEVICE void read_again(const Decode& a) { load(a, now); }
  DEVICE bool holds(const Decode& a) const {
    bool same = true;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (32 * i < a.batch) same = same && now[i].x == known[i].x && now[i].y == known[i].y;
    }
    return __all_sync(~0u, same);
  }
  DEVICE int b() const { return sequence_; }
  DEVICE int pair() const { return pair_; }       // of the sequence's
  DEVICE int cluster(int) const { return part; }  // of the pair's 1 << bits(a)
  DEVICE int bits(const Decode&) const { return bits_; }
  DEVICE int64_t first(const Decode&) const { return item - part; }

  // Whether clusters take further items.
  DEVICE bool more() const { return items > clusters(); }
  // The next one, or -1. It is counted behind the pairs' counters: in each launch once for every item, as each cluster
  // comes once in vain.
  DEVICE int take(const Decode& a) const {
    int* counter = &a.counters[a.batch * a.pairs() << a.block_bits];
    const int taken = add_acquire_release(counter, 1), further = clusters() + taken;
    if (taken == items - 1) *counter = 0;  // for the next launch
    return further < items ? further : -1;
  }
  DEVICE void go_on(int further) { item = further; }

 private:
  int item, items;  // this cluster's; of all, if a pair is cut
  int sequence_, pair_, part, bits_;
  bool none_ = false;

  static DEVICE int clusters() { return gridDim.y * gridDim.z; }
  static DEVICE bool few_pairs(const Decode& a) { return gridDim.z > a.batch; }
  static DEVICE int sequence_of_lane(int i) { return threadIdx.x % 32 + 32 * i; }
  // Of sequences that there are not, those of another: nothing looks at them. With zeros in their place ptxas of CUDA
  // 13.0 had one stored a cycle too early.
  static DEVICE void load(const Decode& a, int2 (&of)[HELD]) {
    of[0] = lengths(a, min(sequence_of_lane(0), a.batch - 1));
#pragma unroll
    for (int i = 1; i < HELD; ++i) {
      of[i] = of[0];
      if (32 * i < a.batch) of[i] = lengths(a, min(sequence_of_lane(i), a.batch - 1));
    }
  }

  // The keys of each of the lane's sequences, and how its pairs are cut.
  struct Shares {
    unsigned keys[HELD], longest = 0, shortest = ~0u;
    float of_a_key;
    float parts;  // that a share is counted as
    const Decode& a;

    DEVICE Shares(const Decode& a, const int2 (&lengths)[HELD]) : a(a) {
      unsigned sum = 0;
      const bool all_seen = !a.leftpad_k && !a.window;
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        keys[i] = 0;
        if (32 * i < a.batch) {  // few instructions: they run once, ahead of the first copy
          int seen = min(max(lengths[i].x, 0), a.kv_len);
          if (!all_seen) seen = max(seen - sequence(a, lengths[i]).begin, 0);
          keys[i] = sequence_of_lane(i) < a.batch ? seen : 0;
        }
        sum += keys[i], longest = max(longest, keys[i]);
        if (sequence_of_lane(i) < a.batch) shortest = min(shortest, keys[i]);
      }
      sum = __reduce_add_sync(~0u, sum), longest = __reduce_max_sync(~0u, longest);
      shortest = __reduce_min_sync(~0u, shortest), of_a_key = __fdividef(a.clusters_at_once, float(sum) * a.pairs());
      // Two parts are more than 6 or 7 quarters of a share, or 8 quarters and more, whatever is rounded.
      parts = !few_pairs(a) ? 7.999f / 6 : longest - shortest > shortest / 8 ? 7.999f / 7
                                                                             : 1.0001f;
    }
    DEVICE int group(unsigned keys, int bits) const { return group_of(keys * of_a_key, bits > 0); }
    DEVICE bool differ() const { return bits(longest) > 0 || group(longest, 0) != group(shortest, 0); }
    // 1 << bits clusters for a pair.
    DEVICE int bits(unsigned keys) const {
      const int by_shares = (__float_as_int(keys * of_a_key * parts) >> 23) - 127;
      const int by_keys = 31 - __clz(int(keys)) - (LEAST_BITS + a.block_bits + WARP_BITS + a.tile_bits);
      return max(0, min(min(by_shares, MOST_BITS), by_keys));
    }
  };

  DEVICE void find_among(const Decode& a, const Shares& shares) {
    const int pairs = a.pairs();
    int bits_of[HELD], items_of[HELD], group[HELD], of_lane = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      bits_of[i] = shares.bits(shares.keys[i]);
      group[i] = shares.group(shares.keys[i], bits_of[i]);
      items_of[i] = sequence_of_lane(i) < a.batch ? pairs << bits_of[i] : 0, of_lane += items_of[i];
    }
    items = __reduce_add_sync(~0u, of_lane);
    none_ = item >= items;
    const Place place = place_of(none_ ? 0 : item, items_of, group);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {  // a select between pairs of numbers would have them in memory
      const int x = __shfl_sync(~0u, known[i].x, place.lane), y = __shfl_sync(~0u, known[i].y, place.lane);
      const int bits = __shfl_sync(~0u, bits_of[i], place.lane);
      if (place.i == i) own = make_int2(x, y), bits_ = bits;
    }
    sequence_ = place.lane + 32 * place.i;
    const int of_sequence = none_ ? 0 : item - place.first;
    pair_ = of_sequence >> bits_, part = of_sequence & ((1 << bits_) - 1);
  }
};
