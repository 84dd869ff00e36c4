// bare tiles: transposed, partly replicated, listed, and across two dimensions at once
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x8xf32> {mhlo.sharding = "{devices=[4,2]<=[2,4]T(1,0)}"}, %arg1: tensor<8x8xf32> {mhlo.sharding = "{devices=[1,4,2]<=[8] last_tile_dim_replicate}"}, %arg2: tensor<8x8xf32> {mhlo.sharding = "{devices=[2,4]3,1,2,0,5,4,7,6}"}, %arg3: tensor<8xf32> {mhlo.sharding = "{devices=[8]<=[2,2,2]T(2,1,0)}"}) -> (tensor<8x8xf32> {mhlo.sharding = "{devices=[8,1]<=[8]}"}, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8xf32>) {
    return %arg0, %arg1, %arg2, %arg3 : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8xf32>
  }
}
